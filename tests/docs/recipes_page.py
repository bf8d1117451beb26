"""
Writes the table of docs/recipes.md: the recipes, and what the first line of each says.

    python tests/docs/recipes_page.py --write-docs
"""

import sys
from pathlib import Path


sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "benchmarks")]

from recipe_commands import RECIPES, command_of  # noqa: E402
from tables import make_parser, publish  # noqa: E402


PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def table() -> str:
    """Name, command and purpose of each recipe."""
    lines = ["| File | Command | What it does |", "|---|---|---|"]
    for recipe in RECIPES:
        purpose, _, _ = recipe.read_text(encoding="utf-8").partition("\n")
        lines.append(
            f"| `recipes/{recipe.name}` | `{command_of(recipe)}` | {purpose.removeprefix('# ').rstrip('.')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = make_parser(__doc__, PAGE).parse_args()
    publish(arguments, PAGE, "recipes", table(), table())
