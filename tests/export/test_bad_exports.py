"""What cannot be exported is told in one message with what to do, and leaves nothing behind."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import forked
import pytest
import torch
from safetensors.torch import save_file

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.export.files import only_export_to, whole_directory
from hf_tpu_ext.export.make import export_run


@pytest.fixture
def run_dir(lora_run, tmp_path):
    """A copy of a run, to be damaged."""
    return shutil.copytree(lora_run, tmp_path / "run", ignore=shutil.ignore_patterns("merged"))


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "options", "messages"),
    [
        (shutil.rmtree, {}, ["there is no such directory", "checkpoint-N"]),
        (
            lambda run: (run / "adapter_config.json").unlink(),
            {},
            ["neither an adapter", "checkpoint-10, checkpoint-5"],
        ),
        (lambda run: None, {"merge": False}, ["holds an adapter. Add --merge."]),
        (lambda run: None, {"dtype": "int8"}, ["--dtype int8", "float32, bfloat16, float16"]),
        (lambda run: None, {"base_model": "absent/model"}, ["absent/model", "--base_model DIRECTORY"]),
        (
            lambda run: edit(run / "adapter_config.json", base_model_name_or_path="absent/model"),
            {},
            ["absent/model, which the adapter", "not found", "--base_model DIRECTORY"],
        ),
        (lambda run: edit(run / "adapter_config.json", base_model_name_or_path=None), {}, ["Add --base_model"]),
        (lambda run: cut(run / "adapter_config.json"), {}, ["adapter_config.json cannot be read"]),
        (lambda run: cut(run / "adapter_model.safetensors"), {}, ["adapter_model.safetensors cannot be read"]),
        (lambda run: (run / "adapter_model.safetensors").unlink(), {}, ["has no adapter_model.safetensors"]),
        (lambda run: edit(run / "adapter_config.json", r=4), {}, ["does not fit", "--base_model DIRECTORY"]),
        (lambda run: None, {"ema": True}, ["has no ema.safetensors", "ema_decay=0.999", "Leave out --ema"]),
        (
            lambda run: save_file({"model.norm.weight": torch.ones(2)}, run / "ema.safetensors"),
            {"ema": True},
            ["ema.safetensors is not of the model beside it", "no model.norm.weight of shape (2,)"],
        ),
        (
            lambda run: (run / "ema.safetensors").write_bytes(b"damaged"),
            {"ema": True},
            ["ema.safetensors cannot be read", "another checkpoint"],
        ),
        (lambda run: None, {"output_dir": "run"}, ["which is exported", "--output_dir"]),
        (lambda run: None, {"output_dir": "run/checkpoint-5", "overwrite": True}, ["no export", "another directory"]),
        (lambda run: None, {"output_dir": "run/README.md"}, ["is not a directory"]),
    ],
)
def test_mistakes_are_told(run_dir, tmp_path, damage, options, messages):
    damage(run_dir)
    before = sorted(tmp_path.rglob("*"))
    options = {"merge": True, **options}
    if "output_dir" in options:
        options["output_dir"] = tmp_path / options["output_dir"]
    with pytest.raises(ValueError) as error:
        export_run(run_dir, **options)
    for message in messages:
        assert message in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_truncated_weights_of_a_whole_model(full_run, tmp_path):
    run = shutil.copytree(full_run, tmp_path / "run", ignore=shutil.ignore_patterns("converted"))
    cut(run / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be read .* Take another checkpoint"):
        export_run(run, dtype="float32")


def test_a_checkpoint_that_is_not_what_was_written(run_dir):
    weights = run_dir / "checkpoint-5" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ValueError, match="adapter_model.safetensors does not match its SHA-256.* Take another checkpoint"
    ):
        export_run(run_dir / "checkpoint-5", merge=True)
    (run_dir / "checkpoint-5" / "manifest.json").unlink()
    assert export_run(run_dir / "checkpoint-5", merge=True, prompts=["1+1?"]).output_dir


@pytest.mark.slow
def test_a_kill_leaves_no_half_of_an_export(run_dir):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "export", str(run_dir), "--merge"]
    process = forked.Popen(command)
    partial = run_dir / ".merged.hf_tpu_export"
    while not partial.exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert partial.exists()
    assert not (run_dir / "merged").exists()
    assert forked.run(command, timeout=300).returncode == 0
    assert not list(run_dir.glob(".*"))
    assert (run_dir / "merged" / "export.json").is_file()


@pytest.mark.filterwarnings("ignore:Model (with|has) `tie_word_embeddings=True`", "ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "lora_bias": True},
        {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": {"embed_tokens": [1, 2]}, "tied": True},
    ],
)
def test_what_peft_cannot_merge_is_a_sentence(make_adapter, settings):
    run_dir, _ = make_adapter(**settings)
    with pytest.raises(UserError, match="cannot be merged into its base .* It is used as it is"):
        export_run(run_dir, merge=True)


def test_prompt_tuning_has_nothing_to_merge(base, tmp_path):
    from peft import PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "run")
    with pytest.raises(ValueError, match="AutoPeftModelForCausalLM"):
        export_run(tmp_path / "run", merge=True)


def test_an_earlier_export_is_replaced_on_request_only(run_dir, capsys):
    command = ["export", str(run_dir), "--merge", "--prompts", "1+1?"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "same top-1" in said
    assert "100.0%" in said
    mine = run_dir / "merged" / "merged.Q4_0.gguf"
    mine.touch()
    assert main([*command, "--overwrite"]) == 2
    assert "files that it did not write: merged.Q4_0.gguf. Move them away" in capsys.readouterr().err
    mine.rename(run_dir / mine.name)
    assert main(command) == 2
    assert "holds an export already. Add --overwrite" in capsys.readouterr().err
    # As a run that was resumed leaves it.
    (run_dir / "adapter_model.safetensors").touch()
    assert main(command) == 2
    newer = run_dir / "adapter_model.safetensors"
    assert f"holds an export already. It is older than {newer}, and so of an earlier" in capsys.readouterr().err
    before = (run_dir / "merged" / "export.json").stat()
    assert main([*command, "--overwrite"]) == 0
    assert (run_dir / "merged" / "export.json").stat() != before
    assert not list(run_dir.glob(".*"))


def test_status_says_that_the_export_differs(make_adapter, capsys):
    run_dir, _ = make_adapter(scale=1e-3, target_modules=["q_proj"])
    assert main(["export", str(run_dir), "--merge", "--dtype", "bfloat16"]) == 1
    assert "Export with --dtype float32" in capsys.readouterr().out


@pytest.mark.slow
def test_disk_full_in_the_middle(run_dir):
    """A file may not grow beyond what is left: here the limit of the process, which the kernel enforces alike."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "export", str(run_dir), "--merge"]
    result = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert "merged cannot be written" in result.stderr
    assert "Nothing of it was kept" in result.stderr
    assert not (run_dir / "merged").exists()
    assert not list(run_dir.glob(".*"))


@pytest.mark.parametrize("replaced", [True, False])
def test_what_a_killed_export_has_left_is_removed(tmp_path, replaced):
    """But for an earlier export, where it was killed between the two renames."""
    left = tmp_path / ".merged.hf_tpu_export"
    (left / "merged").mkdir(parents=True)
    (left / "merged" / "half").touch()
    for name in [left / "replaced"] * replaced + [tmp_path / ".merged.partial", tmp_path / ".merged.old"]:
        name.mkdir()
        (name / "earlier").touch()
    with whole_directory(tmp_path / "merged") as partial:
        (partial / "model").touch()
        assert (tmp_path / "merged" / "earlier").exists() == replaced
    # Those that only look alike are somebody's own.
    assert {path.name for path in tmp_path.iterdir()} == {"merged", ".merged.partial", ".merged.old"}
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["model"]


def test_two_exports_to_one_directory(run_dir, capsys):
    """The second writes nothing, and leaves alone what the first writes."""
    command = ["export", str(run_dir), "--merge", "--prompts", "1+1?"]
    merged = run_dir / "merged"
    with only_export_to(merged), whole_directory(merged) as first:
        (first / "model").touch()
        assert main(command) == 2
        refusal = capsys.readouterr().err
        assert f"Another export writes to {merged} now (process {os.getpid()} on " in refusal
        assert "Write to another place, or wait until that export has ended." in refusal
        # Another place is free.
        assert main([*command, "--output_dir", str(run_dir / "mine")]) == 0
    assert [path.name for path in merged.iterdir()] == ["model"]
    assert not list(run_dir.glob(".*"))
    assert main(command) == 2
    assert "holds files that are no export" in capsys.readouterr().err


def test_the_earlier_export_stays_where_the_new_one_gets_no_name(tmp_path):
    """Both renames have to succeed: here what was written is gone before the second."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "model").touch()
    with pytest.raises(OSError), whole_directory(tmp_path / "merged") as partial:
        partial.rmdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["merged", "model"]


def test_the_earlier_export_stays_where_the_new_one_fails(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "model").touch()
    with pytest.raises(KeyboardInterrupt), whole_directory(tmp_path / "merged"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.rglob("*")] == ["merged", "model"]
