"""The recipes of the repository, and what runs each."""

from pathlib import Path


RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def command_of(recipe):
    """What runs a recipe, which its name begins with; `kd_...` is supervised fine-tuning, too."""
    kind = recipe.stem.partition("_")[0]
    return kind if kind in ("dpo", "reward", "kto", "grpo", "distillation") else "sft"
