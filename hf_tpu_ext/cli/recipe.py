"""A recipe: the YAML file that `trl` takes, and the command line that overrides it."""

import argparse
import dataclasses
import difflib
import enum
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser


#: Where `--smoke` looks for a model and data, and what `hf-tpu prepare tiny` is told to write.
SMOKE_DIR = ".cache/tiny"
#: Keys that make sense with the recipe's own model, data and checkpoints only.
_OF_THE_REAL_RUN = (
    "model_revision",
    "chat_template_path",
    "eos_token",
    "pad_token",
    "datasets",
    "dataset_config",
    "dataset_text_field",
    "dataset_streaming",
    "streaming",
    "test_split_size",
    "resume_from_checkpoint",
)
_BOOLEANS = {"true": True, "false": False}


@dataclasses.dataclass
class Recipe:
    """
    What a person asked for, before it is known which keys there are.

    Args:
        path (`str` or `None`): The YAML file given by `--config`.
        values (`dict[str, Any]`): Its keys, without `env`.
        env (`dict[str, str]`): Environment variables under its `env` key.
        argv (`list[str]`): The rest of the command line.
        smoke (`str` or `None`): Directory given by `--smoke`.
    """

    path: str | None
    values: dict[str, Any]
    env: dict[str, str]
    argv: list[str]
    smoke: str | None

    def use_tiny(self, data: str) -> None:
        """
        Put the tiny model and the dataset `data` of the `--smoke` directory in place of the recipe's, for a few steps.
        """
        directory = Path(self.smoke)
        for needed in ("model", data):
            if not (directory / needed).is_dir():
                raise ValueError(
                    f"--smoke: {directory} holds no {needed}. Make it: hf-tpu prepare tiny --output_dir {directory}"
                )
        for key in _OF_THE_REAL_RUN:
            self.values.pop(key, None)
        self.values |= {
            "model_name_or_path": str(directory / "model"),
            "dataset_name": str(directory / data),
            "dataset_train_split": "train",
            "dataset_test_split": "test",
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "eval_steps": 2,
            "save_steps": 4,
            "report_to": "none",
            "push_to_hub": False,
            "output_dir": f"runs/smoke/{Path(self.path or 'command_line').stem}",
        }
        if "num_generations" in self.values:
            # All completions of a prompt fit into a batch.
            self.values["num_generations"] = self.values["per_device_train_batch_size"] = 4
        if "max_completion_length" in self.values:
            self.values["max_completion_length"] = 16
        if "teacher_model_name_or_path" in self.values:
            self.values["teacher_model_name_or_path"] = str(directory / "teacher")
        if self.values.get("kd_teacher") not in (None, "base"):
            self.values["kd_teacher"] = str(directory / "teacher")
        if "kd_cache" in self.values:
            self.values["kd_cache"] = f"{self.values['output_dir']}/teacher_cache"
        if {"kd_cache", "kd_top_k"} & set(self.values):
            # More than the tiny vocabulary holds is refused.
            self.values["kd_top_k"] = 16


class OptionParser(argparse.ArgumentParser):
    """Takes the options it knows out of a command line. What argparse would exit for is a `ValueError`."""

    def __init__(self):
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message):
        raise ValueError(f"command line: {message}")


def read_recipe(argv: list[str], loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Recipe:
    """
    Read the YAML file of a command line, without PyTorch: the recipe's `env` is to be applied before its import.

    Args:
        argv (`list[str]`): Arguments of the command. `--config`, `--smoke` and `--backend` are taken out of them.
        loader (`type`, *optional*): What reads the file.

    Raises:
        `ValueError`: The file is missing or is not a YAML mapping.
    """
    parser = OptionParser()
    parser.add_argument("--config")
    parser.add_argument("--smoke", nargs="?", const=SMOKE_DIR)
    parser.add_argument("--backend")
    known, rest = parser.parse_known_args(argv)
    values = _read_yaml(known.config, loader) if known.config is not None else {}
    env = values.pop("env", {})
    if not isinstance(env, dict):
        raise ValueError(f"{known.config}: env is {env!r}, expected a mapping such as `env: {{PJRT_DEVICE: CPU}}`.")
    _flatten_qat(values, known.config)
    if known.backend is not None:
        values["backend"] = known.backend
    env = {str(name): str(value) for name, value in env.items()}
    return Recipe(known.config, values, env, rest, known.smoke)


def _flatten_qat(values: dict[str, Any], path: str | None) -> None:
    """Replace a mapping under `qat`, the form that Axolotl has, by its keys behind a prefix: `qat_weight_dtype`."""
    if "qat" not in values:
        return
    qat = values.pop("qat")
    if not isinstance(qat, dict):
        raise ValueError(
            f"{path}: qat is {qat!r}, expected a mapping such as `qat: {{weight_dtype: int4, group_size: 32}}`."
        )
    for key, value in qat.items():
        if f"qat_{key}" in values:
            raise ValueError(f"{path}: {key!r} under qat and qat_{key} are the same key. Leave one of them.")
        values[f"qat_{key}"] = value


def load_recipe(argv: list[str], tiny_data: str) -> Recipe:
    """Read a recipe and set its environment variables; `tiny_data` is the dataset that `--smoke` puts in its place."""
    recipe = read_recipe(argv, _StrictLoader)
    os.environ.update(recipe.env)
    if recipe.smoke is not None:
        recipe.use_tiny(tiny_data)
    return recipe


def open_recipe(argv: list[str], tiny_data: str) -> Recipe:
    """[`load_recipe`], and select the backend that it asks for."""
    recipe = load_recipe(argv, tiny_data)
    # Imported here: PyTorch comes with it, and reads the environment.
    from ..backends import select_backend

    # Eager CPU needs nothing of what else the environment may ask for.
    uses_cpu = recipe.values.get("use_cpu") is True or "--use_cpu" in recipe.argv
    select_backend("cpu" if uses_cpu else recipe.values.get("backend"))
    return recipe


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            # `<<` takes over the keys of another mapping.
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                lines.setdefault(key.value, []).append(key.start_mark.line + 1)
        for key, places in lines.items():
            if len(places) > 1:
                where = " and ".join(map(str, places))
                raise ValueError(f"--config {self.name}: the key {key!r} stands in lines {where}. Leave one of them.")
        return node


def _read_yaml(path: str, loader: type[yaml.SafeLoader]) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, loader)
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {error}") from error
    if values is None:
        raise ValueError(f"--config {path}: the file is empty. A first line: `model_name_or_path: Qwen/Qwen3-0.6B`.")
    if not isinstance(values, dict):
        raise ValueError(f"--config {path}: expected `key: value` lines, found a {type(values).__name__}.")
    return values


_KEYS = f"""
  --config   YAML file of keys; environment variables go under its key `env`
  --smoke    try the recipe first: 4 short steps on the tiny model and data in DIR (default {SMOKE_DIR}), which
             `hf-tpu prepare tiny --output_dir {SMOKE_DIR}` makes

A key is spelled alike in the file (learning_rate: 1e-4) and on the command line (--learning_rate 1e-4), which counts more.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


class RecipeParser(TrlParser):
    """
    A [`~trl.TrlParser`] whose errors are `ValueError`s that say which key and value, what was expected, and where it
    was found.

    Args:
        dataclass_types (`tuple[type, ...]`): Dataclasses whose fields are the keys of the recipe.
        command (`str`): Name of the sub-command.
        description (`str`): First part of its help.
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
        self._hints = {key: hint for kind in dataclass_types for key, hint in typing.get_type_hints(kind).items()}

    def error(self, message):
        raise ValueError(f"command line: {message}")

    def parse(self, recipe: Recipe) -> tuple[Any, ...]:
        """Make the dataclasses from a recipe. The command line counts more than the YAML file."""
        # A boolean has a second action with the same destination: `--no_KEY`, which takes no value.
        actions = {action.dest: action for action in self._actions if action.nargs != 0}
        values = {
            key: self._converted(actions[key], value, recipe.path)
            for key, value in recipe.values.items()
            if key in actions
        }
        self.set_defaults_with_config(**values)
        _, rest = self.parse_known_args(recipe.argv)
        self._refuse_unknown([key for key in recipe.values if key not in actions], rest, list(actions), recipe.path)
        try:
            *parsed, _ = self.parse_args_into_dataclasses(
                recipe.argv, return_remaining_strings=True, look_for_args_file=False
            )
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from error
        for arguments in parsed:
            # The field is a string, but the trainer tells `True` (the latest checkpoint) from a path by its type.
            if "resume_from_checkpoint" in vars(arguments):
                given = arguments.resume_from_checkpoint
                arguments.resume_from_checkpoint = _BOOLEANS.get(str(given).lower(), given)
        return tuple(parsed)

    def _converted(self, action: argparse.Action, value: Any, path: str | None) -> Any:
        hint = self._hints[action.dest]
        try:
            converted = _convert(action, hint, value)
            if action.choices is not None and converted not in action.choices:
                raise ValueError
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            if action.choices is not None:
                expected = f"one of {', '.join(map(str, action.choices))}"
            else:
                expected = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ValueError(f"{path}: {action.dest} is {value!r}, expected {expected}.") from None
        return converted

    def _refuse_unknown(self, in_file: list[str], rest: list[str], known: list[str], path: str | None) -> None:
        if rest and not rest[0].startswith("--"):
            raise ValueError(f"command line: unexpected {rest[0]!r}. A recipe is given as: --config {rest[0]}")
        found = [(key, f"in {path}") for key in in_file]
        found += [
            (option[2:].partition("=")[0].replace("-", "_"), "on the command line")
            for option in rest
            if option.startswith("--")
        ]
        if not found:
            return
        launcher = _launcher_keys()
        unknown = [(key, where) for key, where in found if key not in launcher]
        if unknown:
            lines = []
            for key, where in unknown:
                close = difflib.get_close_matches(key, [*known, *launcher, "config", "smoke"], n=1)
                hint = f"Did you mean {close[0]!r}?" if close else f"`{self.prog} --help` lists the keys."
                lines.append(f"unknown key {key!r} {where}. {hint}")
            raise ValueError("\n".join(lines))
        keys = ", ".join(key for key, _ in found)
        print(f"{self.prog}: no effect, because one process trains (no `accelerate launch`): {keys}", file=sys.stderr)


def _launcher_keys() -> list[str]:
    from accelerate.commands.launch import launch_command_parser

    # `accelerate_config` is the option that `trl` adds to those of `accelerate launch`.
    return [*vars(launch_command_parser().parse_known_args(["script"])[0]), "accelerate_config"]


def _convert(action: argparse.Action, hint: Any, value: Any) -> Any:
    """A YAML value as the command line would give it; `TrlParser` converts the strings among them only."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(kind) or kind for kind in (typing.get_args(hint) if is_union else (hint,))]
    if action.nargs == "+" and value is not None:
        # The mappings are the entries of `datasets`.
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else action.type(str(item)) for item in items]
    if type(value) in kinds:
        return value
    if isinstance(value, (dict, list)) or value is None:
        raise TypeError
    if isinstance(value, bool) and action.type is str:
        return value
    # YAML reads an unquoted `no` as false.
    if value is False and any(isinstance(kind, enum.EnumType) for kind in kinds):
        return "no"
    return action.type(str(value))
