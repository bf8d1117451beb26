"""A path in a recipe that is not there is refused at once. The hub would be asked for it, for the better part of a minute."""

import difflib
import os

from ..errors import UserError
from ..hub_names import may_be_on_hub
from .recipe import Recipe


#: Keys that take a directory, or the name of something on the hub.
_KEYS = ("dataset_name", "model_name_or_path", "teacher_model_name_or_path", "kd_teacher")


class NoSuchPath(UserError):
    """A path in a recipe is not there."""


def check_paths(recipe: Recipe, reads_data: bool = True) -> None:
    """Refuse paths that are not there ([`NoSuchPath`]), unless they may be names on the hub, or nothing `reads_data`."""
    for key in _KEYS if reads_data else _KEYS[1:]:
        value = recipe.get(key)
        if not isinstance(value, str) or "://" in value or os.path.exists(value):
            continue
        directory, _, name = value.rstrip("/").rpartition("/")
        inside = os.listdir(directory or ".") if os.path.isdir(directory or ".") else []
        near = difflib.get_close_matches(name, inside, n=1, cutoff=0.75)
        # `Qwen/Qwen3-0.6B` may be on the hub, although there is a directory `Qwen` here.
        if not may_be_on_hub(value) or (directory and near):
            hint = f" Did you mean {os.path.join(directory, near[0])!r}?" if near else ""
            raise NoSuchPath(
                f"{recipe.where(key)}: {key} is {value!r}, and there is no such file or directory in {os.getcwd()}, where paths "
                f"begin.{hint}"
            )
