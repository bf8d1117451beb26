"""Reward functions of a recipe that are not there are named before a model is loaded."""

import difflib
import os
import sys
from collections.abc import Iterable
from importlib import import_module

from ..errors import UserError
from ..hub_names import hint_at_similar


# What TRL's scripts know by name.
_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


def check_reward_functions(names: Iterable[str]) -> None:
    """Refuse the name of a reward function that TRL's scripts do not find (`ValueError`): one of theirs, or `module.function`."""
    # As TRL's scripts do, which would import the module next.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        if name in _OF_TRL:
            continue
        module, _, function = name.rpartition(".")
        if not module:
            raise UserError(
                f"reward_funcs: {name!r} is none of TRL's ({', '.join(_OF_TRL)}). A function of yours is named with its module, "
                f"for example my_rewards.{name} for {name} in my_rewards.py."
            )
        try:
            functions = vars(import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                # Something that the module imports.
                raise
            file = f"{module.replace('.', '/')}.py"
            raise UserError(
                f"reward_funcs: {name!r} needs the module {module}, and there is no {file} in {os.getcwd()}, nor an installed "
                f"module of this name.{hint_at_similar(file)}"
            ) from error
        if function not in functions:
            own = [key for key, value in functions.items() if callable(value) and not key.startswith("_")]
            close = difflib.get_close_matches(function, own, n=1)
            hint = f"Did you mean {module}.{close[0]}?" if close else f"It has {', '.join(own) or 'no function'}."
            raise UserError(f"reward_funcs: {module} has no function {function!r}. {hint}")
