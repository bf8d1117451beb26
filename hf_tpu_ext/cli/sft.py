"""`hf-tpu sft`: TRL's supervised fine-tuning script in one process, with `TPUSFTTrainer`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .recipe import Recipe, RecipeParser, open_recipe


DESCRIPTION = """\
Fine-tune a language model on the TPU, GPU or CPU of this machine. Takes the recipes of `trl sft`, keeps the accelerator
in this one process, and runs in place of `trl sft` where HF_TPU_EXT=1 is set (HF_TPU_EXT=0 never).

examples:
  hf-tpu sft --config recipes/sft_lora_qwen3.yaml
  hf-tpu sft --config recipes/sft_lora_qwen3.yaml --learning_rate 1e-4 --max_steps 100
  hf-tpu sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --use_peft --output_dir runs/qwen3
"""
#: What `--smoke` trains on.
TINY_DATA = "data"


def run(argv: list[str]) -> None:
    """Train from the recipe that the arguments after `hf-tpu sft` name."""
    _, training_args, model_args, _ = train(open_recipe(argv, TINY_DATA), "sft", DESCRIPTION)
    loader = "peft.AutoPeftModelForCausalLM" if model_args.use_peft else "transformers.AutoModelForCausalLM"
    print(f"Load it anywhere with {loader}.from_pretrained({training_args.output_dir!r})")
    print("Next: hf-tpu sft --config recipes/sft_lora_qwen3.yaml (add --smoke to try it on a tiny model first)")


def train(
    recipe: Recipe, command: str, description: str, adapt_trainer: Callable[[type], type] | None = None
) -> tuple[Any, ...]:
    """
    Run TRL's script with a recipe.

    Args:
        recipe ([`Recipe`]): The recipe.
        command (`str`): Name of the command, for its help.
        description (`str`): First part of its help.
        adapt_trainer (`Callable[[type], type]`, *optional*): Makes the trainer class from [`TPUSFTTrainer`].

    Returns:
        `tuple`: The arguments of the script.
    """
    import trl
    from trl.scripts.sft import main

    from ..trainers import TPUSFTConfig, TPUSFTTrainer
    from ..trainers.checkpoints import leaving_no_empty_dir
    from ..trainers.setting_checks import check_recipe

    dataclass_types = (trl.ScriptArguments, TPUSFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    arguments = RecipeParser(dataclass_types, command, description).parse(recipe)
    script_args, training_args, model_args, dataset_args = arguments
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing. For example: --model_name_or_path Qwen/Qwen3-0.6B")
    if script_args.dataset_name is None and not dataset_args.datasets:
        raise ValueError("dataset_name is missing. For example: --dataset_name trl-lib/Capybara")
    if adapt_trainer is None:
        check_recipe(training_args)

    upstream = trl.SFTTrainer
    trl.SFTTrainer = TPUSFTTrainer if adapt_trainer is None else adapt_trainer(TPUSFTTrainer)
    try:
        with leaving_no_empty_dir(training_args.output_dir) if adapt_trainer is None else nullcontext():
            main(*arguments)
    except KeyError as error:
        splits = (script_args.dataset_train_split, script_args.dataset_test_split)
        if error.args[0] not in splits:
            raise
        raise ValueError(
            f"The dataset has no split {error.args[0]!r}. Name its splits with dataset_train_split and dataset_test_split "
            f"(given: {splits[0]!r} and {splits[1]!r}), or leave out eval_strategy."
        ) from error
    finally:
        trl.SFTTrainer = upstream
    return arguments
