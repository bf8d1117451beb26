"""Recipes that come with the package."""

from pathlib import Path

import pytest

from hf_tpu_ext.cli.init import BY_COMMAND
from hf_tpu_ext.cli.main import main


ROOT = Path(__file__).parents[2]


def test_all_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(recipe.stem in listed for recipe in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", [*BY_COMMAND, "kd_online_qwen3", "sft_full_qwen3.yaml"])
def test_a_recipe_is_written_with_what_it_needs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 0
    (recipe,) = Path("recipes").glob("*.yaml")
    assert recipe.read_bytes() == (ROOT / recipe).read_bytes()
    assert ("recipes.rewards." in recipe.read_text()) == Path("recipes/rewards.py").exists()
    command = name if name in BY_COMMAND and name != "rloo" else "grpo" if name == "rloo" else "sft"
    assert f"Run it: hf-tpu {command} --config {recipe}\n" in capsys.readouterr().out


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sft"]) == 0
    assert "Wrote recipes/sft_lora_qwen3.yaml" in capsys.readouterr().out
    assert main(["init", "sft"]) == 0
    assert "Kept recipes/sft_lora_qwen3.yaml, which is here already" in capsys.readouterr().out
    Path("recipes/sft_lora_qwen3.yaml").write_text("mine")
    assert main(["init", "sft"]) == 2
    assert "is kept" in capsys.readouterr().err
    assert Path("recipes/sft_lora_qwen3.yaml").read_text() == "mine"
    assert main(["init", "sftt"]) == 2
    message = capsys.readouterr().err
    assert "Did you mean 'sft'?" in message and "Recipes: " in message


def test_what_is_in_the_way_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("recipes").write_text("mine")
    assert main(["init", "sft"]) == 2
    assert "can be written into recipes/" in capsys.readouterr().err
    Path("recipes").unlink()
    Path("recipes/sft_lora_qwen3.yaml").mkdir(parents=True)
    assert main(["init", "sft"]) == 2
    assert "is kept" in capsys.readouterr().err
