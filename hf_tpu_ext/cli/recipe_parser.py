"""From the keys of a recipe to upstream's dataclasses, and to the command line of `accelerate launch`."""

import argparse
import os
import sys
import types
import typing
from typing import Any

from trl import TrlParser

from ..errors import UserError
from ..yes_no import NO, YES
from .recipe import SMOKE_DIR, Recipe
from .recipe_checks import refuse_unknown


#: What to do where processes were asked for that the device does not have.
FOR_PROCESSES_ON_THE_CPU = (
    "for processes on the CPU add --multi_gpu --use_cpu (multi_gpu: true and use_cpu: true in the recipe)"
)

_KEYS = f"""
  --config   YAML file of keys; environment variables go under its key `env`
  --smoke    try the recipe first: 4 short steps on the tiny model and data in DIR (default {SMOKE_DIR}), which
             `hf-tpu prepare tiny --output_dir {SMOKE_DIR}` makes

A key is written the same in the file (learning_rate: 1e-4) and on the command line (--learning_rate 1e-4), which counts
more. On GPUs and on the CPU the options of `accelerate launch` are keys, too (num_processes: 2, accelerate_config: zero3).
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _format_action_invocation(self, action):
        # Each name in one spelling, and the values of those that take few.
        names = ", ".join(name for name in action.option_strings if "-" not in name[2:])
        return names if action.choices is None else f"{names} {{{','.join(map(str, action.choices))}}}"


class RecipeParser(TrlParser):
    """
    A [`~trl.TrlParser`] whose errors are `ValueError`s that say which key and value, what was expected, and where it
    was found. The keys of a recipe are the fields of `dataclass_types`; the `description` is the first part of its
    help.
    """

    def __init__(self, dataclass_types: tuple[type, ...], command: str, description: str):
        super().__init__(
            dataclass_types,
            prog=f"hf-tpu {command}",
            usage=f"hf-tpu {command} [--config recipe.yaml] [--smoke [DIR]] [--key value ...]",
            description=description + _KEYS,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self._show_first("keys of hf_tpu_ext", dataclass_types)
        self._hints = {key: hint for kind in dataclass_types for key, hint in typing.get_type_hints(kind).items()}
        # A boolean that is true by default has a second action with the same destination: `--no_KEY`, without a value.
        self._fields = {action.dest: action for action in self._actions if action.nargs != 0}
        self._negations = {f"no_{action.dest}" for action in self._actions if action.nargs == 0}

    def _show_first(self, title: str, dataclass_types: tuple[type, ...]) -> None:
        """List what this package adds to upstream's keys before these, in the help."""
        own = {
            name
            for cls in (cls for kind in dataclass_types for cls in kind.__mro__)
            if cls.__module__.startswith("hf_tpu_ext.")
            for name in vars(cls).get("__annotations__", {})
        }
        group = self.add_argument_group(title)
        self._action_groups.insert(0, self._action_groups.pop())
        group._group_actions += [action for action in self._optionals._group_actions if action.dest in own]
        self._optionals._group_actions = [
            action for action in self._optionals._group_actions if action.dest not in own
        ]

    def error(self, message):
        # argparse sees no key but those that are required and missing.
        raise UserError(message)

    def parse(self, recipe: Recipe) -> tuple[Any, ...]:
        """
        Make the dataclasses from a recipe.

        Raises:
            `ValueError`: A key is unknown, or a value is not what its key takes.
        """
        if recipe.asks_for_help:
            self.print_help()
            self.exit()
        options = self.split(recipe)
        if options and not recipe.launcher_applies and os.environ.get("RANK", "0") == "0":
            on_host = "num_processes" in options and os.environ.get("PJRT_DEVICE") == "CPU"
            how = f"; {FOR_PROCESSES_ON_THE_CPU}" * on_host
            print(
                f"{self.prog}: no effect, because one process drives all chips (no `accelerate launch`): "
                f"{', '.join(options)}{how}",
                file=sys.stderr,
            )
        self.set_defaults_with_config(
            **{key: self._convert_value(key, recipe) for key in self._fields if key in recipe}
        )
        self.set_defaults_with_config(**{key[3:]: False for key in self._negations & recipe.command_line.keys()})
        try:
            instances = self.parse_args_into_dataclasses([], look_for_args_file=False)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error
        for arguments in instances:
            # The field is a string, but the trainer tells `True` (the latest checkpoint) from a path by its type.
            if "resume_from_checkpoint" in vars(arguments):
                arguments.resume_from_checkpoint = _boolean(arguments.resume_from_checkpoint)
        return instances

    def split(self, recipe: Recipe) -> dict[str, argparse.Action]:
        """
        The keys of a recipe that are options of `accelerate launch`, in its order, with what that does with each. As with `trl`,
        what is also a field of the dataclasses is not among them.

        Raises:
            `ValueError`: A key is neither.
        """
        rest = [
            (values, key)
            for values in (recipe.file, recipe.command_line)
            for key in values
            if key not in self._fields and not (values is recipe.command_line and key in self._negations)
        ]
        if not rest:
            return {}
        launcher = _launcher_actions()
        unknown = [(values, key) for values, key in rest if key not in launcher]
        refuse_unknown(recipe, unknown, [*self._fields, *launcher, "config", "smoke"], self.prog)
        return {key: launcher[key] for _, key in rest}

    def launcher_words(self, recipe: Recipe) -> list[str]:
        """The command line of `accelerate launch` that a recipe asks for, without a script. Raises as [`split`] does."""
        options = self.split(recipe).items()
        return [word for key, action in options for word in _launcher_option(key, action, recipe)]

    def _convert_value(self, key: str, recipe: Recipe) -> Any:
        action, hint, value = self._fields[key], self._hints[key], recipe.get(key)
        try:
            result = _convert(action, hint, value)
            if action.choices is not None and result not in action.choices:
                raise ValueError
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            if action.choices is not None:
                allowed_values = f"one of {', '.join(map(str, action.choices))}"
            else:
                allowed_values = hint.__name__ if isinstance(hint, type) else str(hint)
                if action.default is not None:
                    # An example of how a value is written.
                    allowed_values += f" (default: {action.default})"
            problem = "has no value" if value is True else f"is {value!r}"
            raise UserError(f"{recipe.where(key)}: {key} {problem}, expected {allowed_values}.") from None
        return result


def _launcher_actions() -> dict[str, argparse.Action]:
    """The options of `accelerate launch`, by their names with underscores."""
    from accelerate.commands.launch import launch_command_parser

    # `trl` adds one of its own.
    actions = [*launch_command_parser()._actions, argparse.Action(["--accelerate_config"], "accelerate_config")]
    return {name.lstrip("-").replace("-", "_"): action for action in actions for name in action.option_strings}


def _launcher_option(key: str, action: argparse.Action, recipe: Recipe) -> list[str]:
    """An option of `accelerate launch` as `trl` hands it on."""
    value, option = recipe.get(key), action.option_strings[-1]
    literal = _boolean(value)
    if action.nargs == 0:
        if not isinstance(literal, bool):
            raise UserError(f"{recipe.where(key)}: {key} is {value!r}, expected true or false.")
        return [option] if literal else []
    if value is True or isinstance(value, (dict, list)) or value is None:
        problem = "has no value" if value in (True, None) else f"is {value!r}"
        raise UserError(f"{recipe.where(key)}: {key} {problem}, expected one value: {key}: VALUE, or --{key} VALUE.")
    if key in recipe.command_line or action.choices is not None:
        return [option, str(value)]
    return [option, str(literal)]


def _boolean(value: Any) -> Any:
    """What is written as a yes or no as a boolean, and all else as it is. Numbers are numbers here."""
    text = str(value).lower()
    return text in YES if text in (YES | NO) - {"1", "0"} else value


def _convert(action: argparse.Action, hint: Any, value: Any) -> Any:
    """A value of a recipe as upstream's parser would convert it from the command line, which it does with strings only."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if is_union else (hint,))]
    if action.nargs == "+" and value is not None and value is not True:
        # The mappings are the entries of `datasets`.
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else action.type(str(item)) for item in items]
    if bool in kinds and isinstance(flag := _boolean(value), bool):
        return flag
    if type(value) in kinds:
        return value
    if isinstance(value, (dict, list, bool)) or value is None:
        raise TypeError
    return action.type(str(value))
