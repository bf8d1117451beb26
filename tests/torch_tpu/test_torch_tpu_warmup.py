"""`hf-tpu warmup` with torch_tpu: what a run needs is compiled in one process, and loaded in another."""

import re

import pytest


@pytest.fixture
def warm(hf_tpu, tmp_path):
    """Warms up, and trains in another process: what both printed, and how many programs each has loaded and compiled."""
    hf_tpu("prepare", "tiny", "--output_dir", "tiny")

    def run(*settings, chips=1, **changes):
        common = ("--smoke", "tiny", "--compile_cache_dir", "cache", *settings)
        changed = [word for name, value in changes.items() for word in (f"--{name}", value)]
        results = [
            hf_tpu("warmup", *common, chips=chips),
            hf_tpu("sft", *common, "--output_dir", "out", *changed, chips=chips),
        ]
        counted = []
        for result in results:
            line = next(line for line in result.stdout.splitlines() if line.startswith("Compilation cache: "))
            counted.append([int(number) for number in re.search("hits: ([0-9]+), misses: ([0-9]+)", line).groups()])
        return results, counted

    yield run
    assert list((tmp_path / "cache").glob("torch_tpu-*/*/*.bin"))


def test_a_run_compiles_nothing_after_a_warm_up(warm, tmp_path):
    """Steps that are compiled whole, for each length, with gradient accumulation and evaluation."""
    config = (
        "--max_length",
        96,
        "--length_buckets",
        64,
        "--eval_strategy",
        "steps",
    )
    changes = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "seed": 5, "max_steps": 8, "logging_steps": 2}
    (warmed, trained), ((_, compiled), (loaded, missed)) = warm(*config, **changes)
    for kind, rows in (("micro-step", 2), ("training step", 2), ("evaluation step", 16)):
        for length in (64, 96):
            assert re.search(rf"^{kind} +{rows} x {length} +[1-9]", warmed.stdout, re.MULTILINE), (kind, length)
    assert "compiled one by one" not in trained.stderr
    assert compiled > 0 and loaded > 0 and missed == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_layers(warm):
    (_, trained), (_, (loaded, missed)) = warm("--max_length", 96, "--compile_step", "layers")
    assert "layers are compiled one by one" in trained.stderr
    assert loaded > 0 and missed == 0


def test_in_a_process_for_each_chip(warm):
    (warmed, trained), (_, (loaded, missed)) = warm("--max_length", 96, chips=2)
    assert warmed.stdout.count("Next: hf-tpu sft") == 1
    assert "2 chips in 2 processes" in trained.stdout
    assert loaded > 0 and missed == 0
