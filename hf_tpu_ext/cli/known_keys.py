"""A typing error in a recipe, found before PyTorch and TRL are imported, which takes seconds."""

import difflib
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import UserError
from .recipe import Recipe


# Where keys are declared: as fields of dataclasses, and as options of parsers.
_DECLARED = {
    "trl": ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/*.py", "cli/**/*.py"),
    "transformers": ("training_args*.py",),
    "accelerate": ("commands/launch.py",),
    "hf_tpu_ext": (
        "cli/cache_teacher.py",
        "cli/plan.py",
        "cli/warmup.py",
        "trainers/configs.py",
        "trainers/*/arguments.py",
    ),
}
_FIELD, _OPTION = re.compile(r"^    (\w+)\s*:", re.MULTILINE), re.compile(r"[\"']--?([A-Za-z][\w-]*)[\"']")


def check_keys(recipe: Recipe) -> None:
    """
    Refuse keys that no command takes (`ValueError`). Those that another command takes are refused by the parser of this one.

    Names are read in the sources, since importing the classes takes seconds. Where there are no sources, all is left to the
    parser.
    """
    known_keys = {*_names()}
    if not {"learning_rate", "model_name_or_path"} <= known_keys:
        return
    unknown = [
        (values, key)
        for values in (recipe.file, recipe.command_line)
        for key in values
        if key not in known_keys and key.removeprefix("no_") not in known_keys and key not in ("h", "help")
    ]
    refuse_unknown(recipe, unknown, known_keys)


def refuse_unknown(
    recipe: Recipe, unknown: Iterable[tuple[dict[str, Any], str]], known_keys: Iterable[str], prog: str = ""
) -> None:
    """
    Refuse keys of a recipe (`ValueError`), each with the values among which it stands, and say which of the `known_keys` is meant, or
    that the help of `prog` lists them.
    """
    lines = []
    for values, key in unknown:
        # `lora_rank` is meant for `lora_r`, although `local_rank` has more letters of it.
        beginnings = sorted((name for name in known_keys if "_" in name and key.startswith(name)), key=len)
        close = beginnings[-1:] or difflib.get_close_matches(key, list(known_keys), n=1)
        where = f"in {recipe.path}" if values is recipe.file else "on the command line"
        hint = f"Did you mean {close[0]!r}?" if close else f"`{f'{prog} --help'.strip()}` lists the keys."
        lines.append(f"unknown key {key!r} {where}. {hint}")
    if lines:
        raise UserError("\n".join(lines))


def _names() -> Iterator[str]:
    for package, patterns in _DECLARED.items():
        spec = find_spec(package)
        for directory in spec.submodule_search_locations if spec else ():
            for path in (path for pattern in patterns for path in Path(directory).glob(pattern)):
                text = path.read_text(encoding="utf-8")
                yield from _FIELD.findall(text)
                yield from (name.replace("-", "_") for name in _OPTION.findall(text))
