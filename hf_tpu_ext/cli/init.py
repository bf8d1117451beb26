"""`hf-tpu recipes` and `hf-tpu init`: the recipes that come with this package, and a copy of one to start from."""

import argparse
import difflib
import os
from pathlib import Path

from ..atomic_write import write_atomically
from ..errors import UserError
from .trl_scripts import SCRIPTS


#: In a clone this is a link to `recipes/`.
RECIPES = Path(__file__).parents[1] / "recipes"
#: Where recipes are written, relative to the current directory: commands in them name it.
DIRECTORY = Path("recipes")
# Files that recipes need, by the name that stands in the recipe.
_MODULES = {"recipes.rewards.": "rewards.py"}
#: The recipe to start from for each training command, by its name without `.yaml`.
BY_COMMAND = {command: Path(script.recipe).stem for command, script in SCRIPTS.items()}


def add_parsers(subparsers: argparse._SubParsersAction) -> None:
    """Register the `init` and `recipes` subcommands."""
    init = subparsers.add_parser(
        "init",
        help="write a recipe to start from",
        description="Write a recipe to start from into recipes/, in the current directory.",
    )
    init.add_argument("name", help=f"a command ({', '.join(BY_COMMAND)}), or a recipe that `hf-tpu recipes` lists")
    init.set_defaults(func=write_recipe)
    recipes = subparsers.add_parser(
        "recipes", help="list the recipes that come with this package", description="List the recipes."
    )
    recipes.set_defaults(func=list_recipes)


def list_recipes(args: argparse.Namespace) -> int:
    """Print the recipes, and return the exit status `0`."""
    recipes = sorted(RECIPES.glob("*.yaml"))
    width = max(len(recipe.stem) for recipe in recipes)
    for recipe in recipes:
        # What it does is its first line.
        purpose, _, _ = recipe.read_text(encoding="utf-8").partition("\n")
        print(f"{recipe.stem:<{width}}  {purpose.removeprefix('# ').strip()}")
    print("\nhf-tpu init NAME writes one into recipes/")
    return 0


def write_recipe(args: argparse.Namespace) -> int:
    """Write a recipe, and return the exit status `0`. Raises `ValueError` where there is none, or a file is in the way."""
    name = args.name.removesuffix(".yaml")
    name = BY_COMMAND.get(name, name)
    source = RECIPES / f"{name}.yaml"
    if not source.is_file():
        recipes = [recipe.stem for recipe in sorted(RECIPES.glob("*.yaml"))]
        close = difflib.get_close_matches(name, [*BY_COMMAND, *recipes], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"{args.name!r} is neither a command nor a recipe.{hint} Commands: {', '.join(BY_COMMAND)}. Recipes: {', '.join(recipes)}."
        )
    text = source.read_text(encoding="utf-8")
    sources = [source, *(RECIPES / module for use, module in _MODULES.items() if use in text)]
    for path in sources:
        target = DIRECTORY / path.name
        if os.path.lexists(target) and not (target.is_file() and target.read_bytes() == path.read_bytes()):
            raise UserError(
                f"{target} exists and has other content, so it is kept. Rename it, or start in another directory."
            )
    try:
        DIRECTORY.mkdir(exist_ok=True)
        for path in sources:
            target = DIRECTORY / path.name
            # In a clone of this package, also what somebody has edited is here.
            if target.exists():
                print(f"Kept {target}, which is here already")
                continue
            write_atomically(target, path.read_bytes())
            print(f"Wrote {target}")
    except OSError as error:
        raise UserError(
            f"No recipe can be written into {DIRECTORY}/ of {Path.cwd()} ({error.strerror}). Start in another directory: cd DIR"
        ) from error
    commands = (command for command in BY_COMMAND if f"hf-tpu {command} --config " in text)
    run = f"hf-tpu {next(commands, 'sft')} --config {DIRECTORY / source.name}"
    print(f"Try it on a tiny model: hf-tpu prepare tiny --output_dir .cache/tiny && {run} --smoke\nRun it: {run}")
    return 0
