"""A typing error in a recipe is refused before anything that takes seconds is imported."""

import dataclasses
import subprocess
import sys

import pytest
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from hf_tpu_ext import trainers
from hf_tpu_ext.cli.known_keys import _names, check_keys
from hf_tpu_ext.cli.recipe import Recipe
from hf_tpu_ext.cli.recipe_parser import _launcher_actions
from hf_tpu_ext.errors import UserError


def test_typing_error_is_refused_before_heavy_imports(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rat: 1e-4\n")
    program = (
        "import sys; from hf_tpu_ext.cli.main import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "sft", "--config", str(recipe)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "2 []\n"
    assert f"unknown key 'learning_rat' in {recipe}. Did you mean 'learning_rate'?" in result.stderr


def test_a_key_that_begins_as_a_known_one_is_taken_for_that():
    recipe = Recipe(command_line={"lora_rank": "8"})
    with pytest.raises(UserError, match="unknown key 'lora_rank' on the command line. Did you mean 'lora_r'?"):
        check_keys(recipe)


CONFIGS = [vars(trainers)[name] for name in trainers.__all__ if name.endswith(("Config", "Arguments"))]


@pytest.mark.parametrize("kind", [*CONFIGS, ModelConfig, ScriptArguments, DatasetMixtureConfig])
def test_every_field_is_known(kind):
    assert {field.name for field in dataclasses.fields(kind)} <= {*_names()}


def test_every_option_of_the_launcher_is_known():
    assert {*_launcher_actions()} <= {*_names()}
