"""Every recipe trains, on a tiny model and made data."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import trl
import yaml
from recipe_commands import RECIPES, command_of
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.cli.swap import TRAINERS


SHORT = ["--max_length", "128", "--save_strategy", "steps"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    assert main(["prepare", "tiny", "--output_dir", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def tiny_vision(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny_vision")
    assert main(["prepare", "tiny", "--model_type", "smolvlm", "--output_dir", str(directory)]) == 0
    return directory


@pytest.fixture
def tiny_of(tiny, request):
    """The directory for a recipe: a model of text, or one that sees."""
    return lambda recipe: request.getfixturevalue("tiny_vision") if recipe.stem.startswith("sft_vlm") else tiny


def shortened(recipe):
    """Arguments for short rows. Those of trainers that write completions are as long as prompts and completions are."""
    return SHORT[2:] if command_of(recipe) in ("grpo", "distillation") else SHORT


def check_run(output_dir, steps=4, sees=False):
    state = json.loads((output_dir / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert state["global_step"] == len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    # A directory of an adapter loads through PEFT.
    (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(output_dir)


#: Text of any form; an adapter and pairs; text that is generated. Full fine-tuning goes through the stock command below.
MARKS = {
    "pretrain_tinystories": [],
    "dpo_lora_qwen3": [pytest.mark.ci],
    "grpo_lora_qwen2": [pytest.mark.ci],
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, [pytest.mark.slow])) for path in RECIPES],
)
def test_recipe(recipe, tiny_of, tmp_path, monkeypatch, capsys):
    for name in yaml.safe_load(recipe.read_text()).get("env", {}):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # what the recipe sets is taken back after the test
    upstream = {name: getattr(trl, name) for name in TRAINERS.values()}
    argv = ["--config", str(recipe), "--smoke", str(tiny_of(recipe)), *shortened(recipe)]
    if "kd_cache" in yaml.safe_load(recipe.read_text()):
        argv += ["--kd_cache", str(tmp_path / "cache")]
        assert main(["cache-teacher", *argv]) == 0
    assert main([command_of(recipe), *argv, "--output_dir", str(tmp_path)]) == 0
    check_run(tmp_path, sees=recipe.stem.startswith("sft_vlm"))
    printed = "".join(capsys.readouterr())
    # It would be of the tiny data.
    assert "of the tokens computed are padding" not in printed
    assert ("not the rounded one that it was trained on" in printed) == (recipe.stem == "sft_qlora_qwen2")
    assert {name: getattr(trl, name) for name in upstream} == upstream


def run_command(name, recipe, tiny, output_dir, **env):
    """Run a recipe by a command of its own process."""
    command = [shutil.which(name, path=os.path.dirname(sys.executable))]
    command += [command_of(recipe), "--config", recipe]
    result = subprocess.run(
        [*command, "--smoke", tiny, "--output_dir", output_dir, *shortened(recipe)],
        env={key: value for key, value in os.environ.items() if key != "HF_TPU_EXT"} | env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    check_run(output_dir, sees=recipe.stem.startswith("sft_vlm"))
    return result


FULL = next(path for path in RECIPES if path.stem == "sft_full_qwen3")


@pytest.mark.slow
def test_recipe_through_the_stock_command(tiny, tmp_path):
    result = run_command("trl", FULL, tiny, tmp_path)
    assert "`trl sft` is run by hf_tpu_ext, because the recipe's env says HF_TPU_EXT: 1" in result.stderr
    assert "torchao" not in result.stderr and "bitsandbytes" not in result.stderr


@pytest.mark.slow
def test_recipe_on_eight_devices_through_the_stock_command(tiny, tmp_path):
    result = run_command("trl", FULL, tiny, tmp_path, CPU_NUM_DEVICES="8")
    printed = result.stdout + result.stderr
    assert (
        "local batch size 2 x 96 per chip; global batch size 32 (2 per chip x 2 gradient accumulation steps x 8 chips)"
        in printed
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [path for path in RECIPES if "kd_cache" not in yaml.safe_load(path.read_text())],
    ids=lambda path: path.stem,
)
def test_recipe_on_eight_devices(recipe, tiny_of, tmp_path):
    result = run_command("hf-tpu", recipe, tiny_of(recipe), tmp_path, CPU_NUM_DEVICES="8")
    assert "8 chips" in result.stdout + result.stderr


def test_absent_split_is_named(tiny, tmp_path, capsys):
    argv = ["sft", "--model_name_or_path", str(tiny / "model"), "--dataset_name", str(tiny / "data"), "--use_cpu"]
    assert main([*argv, "--dataset_train_split", "training", "--output_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "The dataset has no split 'training'" in error
    assert "holds test.jsonl, train.jsonl: set dataset_train_split to train. Or" in error


def test_a_file_that_makes_no_split_is_named(tiny, tmp_path, capsys):
    """`datasets` leaves it out without a word, also where the recipe names it as a split."""
    data = tmp_path / "chats"
    data.mkdir()
    for split, name in (("train", "train.jsonl"), ("test", "heldout.jsonl")):
        (data / name).write_bytes((tiny / "data" / f"{split}.jsonl").read_bytes())
    argv = ["sft", "--model_name_or_path", str(tiny / "model"), "--dataset_name", str(data), "--use_cpu"]
    argv += ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--eval_strategy", "steps"]
    for split in ("test", "heldout"):
        assert main([*argv, "--dataset_test_split", split]) == 2
        error = capsys.readouterr().err
        assert (
            f"has no split '{split}'. {data} holds heldout.jsonl, train.jsonl: rename the file to evaluate on" in error
        )
        assert ("to test.jsonl and dataset_test_split to test. Or" in error) == (split == "heldout")
    (data / "heldout.jsonl").rename(tmp_path / "test.jsonl")
    assert main(argv) == 2
    said = (
        f"{data} holds train.jsonl: put rows to evaluate on beside it, as test.jsonl; or have a part of them held out, by `datasets: "
        f"[{{path: {data}}}]` and `test_split_size: 0.1` in a recipe; or leave out eval_strategy."
    )
    assert said in capsys.readouterr().err
    (tmp_path / "test.jsonl").rename(data / "test.jsonl")
    assert main(argv) == 0
