"""`hf-tpu warmup` compiles what a run needs, and a second process of a recipe misses nothing."""

import hashlib
import json
import os
import re
import sys

import forked
import pytest
import yaml

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model, make_preferences, make_questions


RECIPE = {
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "length_buckets": [64, 96],
    "max_length": 96,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Directory with a model, its data, and the same data in another order."""
    directory = tmp_path_factory.mktemp("prepared")
    make_model(directory / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    make_arithmetic(directory / "data", num_rows=160)
    make_preferences(directory / "preferences", num_rows=64)
    make_questions(directory / "questions", num_rows=64)
    (directory / "reversed").mkdir()
    for split in ("train", "test"):
        rows = (directory / "data" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (directory / "reversed" / f"{split}.jsonl").write_text("".join(reversed(rows)))
    return directory


def contents(directory):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def command(prepared, tmp_path):
    """Gives a command in a process of its own, with a cache that all of a test share; its counts and its output."""

    def run(name, *argv, devices=1, data="data", status=0, **changes):
        values = {**RECIPE, "model_name_or_path": str(prepared / "model"), "dataset_name": str(prepared / data)}
        values |= {"compile_cache_dir": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run"), **changes}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
        result = forked.run(
            [sys.executable, "-m", "hf_tpu_ext.cli.main", *name.split(), "--config", recipe, *argv],
            env=os.environ | {"CPU_NUM_DEVICES": str(devices)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == status, result.stderr[-3000:]
        if status:
            return None, result
        line = next(line for line in result.stdout.splitlines() if line.startswith("Compilation cache: "))
        assert "hits: 0" in line, "XLA on the host cannot load programs"
        unread = re.search("unreadable: ([0-9]+)", line)
        return (int(re.search("misses: ([0-9]+)", line)[1]), int(unread[1]) if unread else 0), result

    return run


@pytest.mark.ci
def test_run_after_warmup_misses_nothing(command, prepared, tmp_path):
    before = contents(prepared)
    (misses, found), result = command("warmup")
    assert (misses, found) == (7, 0)
    for kind, rows in (("micro-step", 2), ("training step", 2), ("evaluation step", 4)):
        for length in (64, 96):
            assert re.search(rf"^{kind} +{rows} x {length} +1 +0 ", result.stdout, re.MULTILINE)
    assert "compiling: 100%" in result.stderr
    assert "recompilation of" not in result.stderr
    assert not (tmp_path / "run").exists()
    assert contents(prepared) == before

    changes = {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "seed": 5, "run_name": "other", "max_steps": 6}
    changes |= {"logging_steps": 2, "eval_steps": 2, "output_dir": str(tmp_path / "deeper" / "other")}
    (misses, found), _ = command("sft", data="reversed", **changes)
    assert misses == 0 and found >= 4
    assert (tmp_path / "deeper" / "other" / "model.safetensors").exists()


@pytest.mark.slow
def test_other_rows_miss_and_a_cache_that_cannot_be_written_says_so(command, tmp_path):
    command("warmup")
    (misses, _), _ = command("sft", per_device_train_batch_size=3, max_steps=1, eval_strategy="no")
    assert misses > 0

    [toolchain] = (tmp_path / "cache").glob("*/toolchain.json")
    assert json.loads(toolchain.read_text())["chips"] == 1
    toolchain.unlink()
    toolchain.mkdir()
    _, result = command("warmup", status=2)
    expected = "cannot be written (Is a directory): it is used read-only. Set compile_cache_dir to a directory"
    assert expected in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "mesh"), [(4, "data"), pytest.param(8, "data=2,fsdp=4", marks=pytest.mark.slow)])
def test_second_process_misses_nothing_on_a_mesh(devices, mesh, command, tmp_path):
    common = {"devices": devices, "mesh": mesh, "length_buckets": None, "max_steps": 2, "eval_steps": 2}
    (first, found), _ = command("sft", **common)
    assert first >= 4 and found == 0
    (misses, found), _ = command(
        "sft", data="reversed", seed=5, run_name="other", **common | {"output_dir": str(tmp_path / "other")}
    )
    assert (misses, found) == (0, first)


@pytest.mark.slow
def test_warmup_on_a_mesh(command):
    common = {"devices": 4, "mesh": "fsdp", "use_peft": True}
    command("warmup", **common)
    (misses, _), _ = command("sft", max_steps=6, **common)
    assert misses == 0


@pytest.mark.slow
def test_warmup_of_layers_that_alternate(command, tmp_path):
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=6, layer_types=types, sliding_window=9)
    make_model(tmp_path / "model", "gemma3_text", **sizes)
    common = {"model_name_or_path": str(tmp_path / "model"), "scan_layers": "on", "use_peft": True}
    command("warmup", **common)
    (misses, _), _ = command("sft", max_steps=6, **common)
    assert misses == 0


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_warmup_of_preferences(command, streaming, tmp_path, monkeypatch):
    """With a reference whose log-probs are computed ahead of training, and over rows of a stream, which are made longer."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    # The last batch of an evaluation has fewer pairs, which is a graph of its own.
    common = {"data": "preferences", "use_peft": True, "dataloader_drop_last": True, "max_length": 96}
    common |= {"dataset_streaming": True} if streaming else {"precompute_ref_log_probs": True}
    command("warmup dpo", **common)
    assert not (tmp_path / "datasets" / "reference_log_probs").exists()
    (misses, found), _ = command("dpo", **common)
    assert misses == 0 and found >= 4


@pytest.mark.slow
def test_warmup_of_completions(command):
    # Prompts of two lengths: a program for each, one for the tokens after them, and the steps of both.
    common = {
        "data": "questions",
        "max_length": None,
        "length_buckets": [24, 28],
        "eval_strategy": "no",
        "eval_steps": None,
    }
    common |= {"num_generations": 4, "max_completion_length": 8, "reward_funcs": ["recipes.rewards.same_number"]}
    (compiled, _), result = command("warmup grpo", **common)
    for kind in ("micro-step", "training step"):
        for length in (24, 28):
            assert re.search(rf"^{kind} +2 x {length + 8} ", result.stdout, re.MULTILINE)
    # And what is done before the first step.
    assert compiled == 8
    (misses, found), _ = command("grpo", **common)
    assert misses == 0 and found >= 5


@pytest.mark.slow
def test_streamed_rows_take_all_lengths(command):
    (misses, _), result = command(
        "warmup", "--dataset_streaming", "--gradient_accumulation_steps", "1", length_buckets=[32, 64]
    )
    for length in (32, 64, 96):
        assert re.search(rf"^training step +2 x {length} +1 +0 ", result.stdout, re.MULTILINE)
        assert re.search(rf"^evaluation step +4 x {length} +1 +0 ", result.stdout, re.MULTILINE)


@pytest.mark.slow
def test_pretraining(command):
    changes = {
        "length_buckets": None,
        "max_length": 64,
        "packing": True,
        "packing_strategy": "wrapped",
        "from_scratch": True,
    }
    command("warmup", **changes)
    (misses, _), _ = command("sft", **changes)
    assert misses == 0


@pytest.mark.slow
def test_warmup_with_images(command, tmp_path):
    vision = tmp_path / "vision"
    assert main(["prepare", "tiny", "--model_type", "qwen2_5_vl", "--output_dir", str(vision)]) == 0
    common = {"model_name_or_path": str(vision / "model"), "data": vision / "data", "image_tokens": 4, "eval_steps": 3}
    command("warmup", **common)
    (misses, _), _ = command("sft", **common)
    assert misses == 0


# ---- What cannot be warmed up ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "cpu"], "nothing is compiled on cpu (backend='cpu', or use_cpu, was asked for)"),
        ([], "this device (CPU, compiled by XLA) cannot load stored executables"),
        (["--compile_cache_dir", "off"], "compile_cache_dir (or HF_TPU_EXT_COMPILE_CACHE) is off. Leave it out"),
        (["--compile_cache_dir", "{}/model/config.json/cache"], "The compilation cache is off"),
        (["--compile_cache_dir", ""], "compile_cache_dir is empty"),
        (["--no_such_key", "1"], "unknown key 'no_such_key' on the command line. `--help` lists"),
        (["recipe"], "A recipe is given as: --config recipe"),
    ],
)
def test_mistakes(argv, message, prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TPU_EXT_COMPILE_CACHE", raising=False)
    model, data = str(prepared / "model"), str(prepared / "data")
    common = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", str(tmp_path / "run")]
    assert main(["warmup", *(word.format(prepared) for word in argv), *common]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    told = capsys.readouterr().out
    assert "hf-tpu warmup --config recipes/sft_lora_qwen3.yaml" in told
    assert "--length_buckets" in told and "--compile_cache_dir" in told
