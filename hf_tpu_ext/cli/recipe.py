"""A recipe: the YAML file that `trl` takes, and the command line that overrides it. Read before PyTorch is imported."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from ..hub_names import hint_at_similar
from ..yes_no import YES


#: Where `--smoke` looks for a model and data, and what `hf-tpu prepare tiny` is told to write.
SMOKE_DIR = ".cache/tiny"
# What the file of a recipe ends in.
_RECIPES = (".yaml", ".yml")
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


@dataclass
class Recipe:
    """
    What a person asked for, before it is known which keys there are: one mapping of keys, in which the command line counts
    more than the file. A value is as YAML reads it, except for `true`, `no`, `on` and the like, which are kept as they are
    written: whether `off` is a word or a boolean is for the key to say. On the command line a value is a string, several
    are a list of strings, and a key without one is `True`.

    Args:
        path (`str` or `None`): The YAML file given by `--config`.
        file (`dict[str, Any]`): Its keys, without `env`.
        command_line (`dict[str, Any]`): Keys of the command line, without `--config` and `--smoke`.
        env (`dict[str, str]`): Environment variables under the file's `env` key.
        smoke (`str` or `None`): Directory given by `--smoke`.
        argv (`list[str]`): The command line itself, for processes that are to read the recipe again.
        repeated_keys (`dict[str, list[int]]`): Keys that stand in several lines of the file, of which YAML takes the last.
        launcher_applies (`bool`): Whether the options of `accelerate launch` among the keys have their effect.
    """

    path: str | None = None
    file: dict[str, Any] = field(default_factory=dict)
    command_line: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    smoke: str | None = None
    argv: list[str] = field(default_factory=list)
    repeated_keys: dict[str, list[int]] = field(default_factory=dict)
    launcher_applies: bool = False

    def __contains__(self, key: str) -> bool:
        return key in self.command_line or key in self.file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key."""
        return self.command_line.get(key, self.file.get(key, default))

    def says_yes(self, key: str) -> bool:
        """Whether a key is a yes. What is neither yes nor no is left to the parser, which names it."""
        return str(self.get(key)).lower() in YES

    def number(self, key: str) -> int | None:
        """The value of a key as a number, or `None` where it is none. Other values are left to the parser, which names them."""
        value = str(self.get(key))
        return int(value) if value.isdecimal() else None

    def where(self, key: str) -> str:
        """Where a key is, for messages."""
        return "command line" if key in self.command_line else str(self.path)

    @property
    def uses_cpu(self) -> bool:
        """Whether the recipe asks for eager PyTorch on the host, by upstream's key or by that of `accelerate launch`."""
        return self.says_yes("use_cpu") or self.says_yes("cpu")

    @property
    def asks_for_help(self) -> bool:
        """Whether it is `--help` that is asked for."""
        return not {"h", "help"}.isdisjoint(self.command_line)

    def use_tiny(self, data: str) -> None:
        """
        Put the tiny model and the dataset `data` of the `--smoke` directory in place of the recipe's, for a few steps.
        """
        directory = Path(self.smoke)
        for name in ("model", data):
            if not (directory / name).is_dir():
                raise UserError(
                    f"--smoke: {directory} holds no {name}. Create it: hf-tpu prepare tiny --output_dir {directory}"
                )
        for key in _OF_THE_REAL_RUN:
            self.file.pop(key, None)
        self.file |= {
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
        if "num_generations" in self.file:
            # All completions of a prompt fit into a batch.
            self.file["num_generations"] = self.file["per_device_train_batch_size"] = 4
        if "max_completion_length" in self.file:
            self.file["max_completion_length"] = 16
        if "teacher_model_name_or_path" in self.file:
            self.file["teacher_model_name_or_path"] = str(directory / "teacher")
        if self.file.get("kd_teacher") not in (None, "base"):
            self.file["kd_teacher"] = str(directory / "teacher")
        if "kd_cache" in self.file:
            self.file["kd_cache"] = f"{self.file['output_dir']}/teacher_cache"
        if {"kd_cache", "kd_top_k"} & set(self.file):
            # More than the tiny vocabulary holds is refused.
            self.file["kd_top_k"] = 16


def read_recipe(argv: list[str]) -> Recipe:
    """
    Read the command line `argv` of a command, and the YAML file that it names, without PyTorch: the recipe's `env` is to be
    applied before its import.

    Raises:
        `ValueError`: The command line has a word before its first key, or the file is missing or is not a YAML mapping.
    """
    command_line = _keys_of(argv)
    path, smoke = _take_path(command_line, "config", None), _take_path(command_line, "smoke", SMOKE_DIR)
    file, repeated_keys = ({}, {}) if path is None else _read_yaml(path)
    env = file.pop("env", {})
    if not isinstance(env, dict):
        raise UserError(f"{path}: env is {env!r}, expected a mapping such as `env: {{PJRT_DEVICE: CPU}}`.")
    _flatten_qat(file, path)
    env = {str(name): str(value) for name, value in env.items()}
    return Recipe(path, file, command_line, env, smoke, list(argv), repeated_keys)


def load_recipe(argv: list[str], tiny_data: str, reads_data: bool = True) -> Recipe:
    """
    Read a recipe that is to be run, and set its environment variables; `tiny_data` is the dataset that `--smoke` puts in its
    place. A key that stands twice in the file is refused (`ValueError`), and so are one that no command takes, one of LoRA without
    `use_peft`, one that needs a package that is missing, a malformed mesh and a path that is not there, that of the data only where the
    command `reads_data`.
    """
    # Imported here: they import this module.
    from .recipe_checks import check_adapter_keys, check_keys, check_mesh, check_packages, check_paths

    recipe = read_recipe(argv)
    for key, lines in recipe.repeated_keys.items():
        where = " and ".join(map(str, lines))
        raise UserError(f"--config {recipe.path}: the key {key!r} stands in lines {where}. Keep one of them.")
    check_keys(recipe)
    check_adapter_keys(recipe)
    check_mesh(recipe)
    check_packages(recipe)
    os.environ.update(recipe.env)
    if recipe.smoke is not None:
        recipe.use_tiny(tiny_data)
    check_paths(recipe, reads_data)
    return recipe


def with_underscores(word: str) -> str:
    """A word of a command line; the name of an option, `--output-dir`, is spelled as it is declared, `--output_dir`."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def _keys_of(argv: list[str]) -> dict[str, Any]:
    """The keys of a command line: `--key value ...`, `--key=value`, `--key`; with hyphens or underscores."""
    keys: dict[str, list[str]] = {}
    values: list[str] | None = None
    if argv and argv[0].endswith(_RECIPES):
        # A recipe is an option to `trl`, and an argument to its neighbours.
        argv = ["--config", *argv]
    for word in argv:
        if re.match("--?[A-Za-z]", word):
            name, equals, value = with_underscores(word).lstrip("-").partition("=")
            # The last of several counts, as in a parser.
            values = keys[name] = [value] if equals else []
        elif values is None or values and word.endswith(_RECIPES):
            _refuse_word(word)
        else:
            values.append(word)
    return {key: True if not words else words[0] if len(words) == 1 else words for key, words in keys.items()}


def _take_path(command_line: dict[str, Any], key: str, alone: str | None) -> str | None:
    """Take a key that names a file or a directory off the command line; `alone` is what it means without a value."""
    if key not in command_line:
        return None
    value = command_line.pop(key)
    value = alone if value is True else value
    if isinstance(value, list):
        _refuse_word(value[1])
    if value is None:
        raise UserError(f"command line: --{key} has no value, expected a path: --{key} PATH")
    return value


def _refuse_word(word: str) -> None:
    raise UserError(f"command line: unexpected {word!r}. A recipe is given as: --config {word}")


def _flatten_qat(values: dict[str, Any], path: str | None) -> None:
    """Replace a mapping under `qat`, the form that Axolotl has, by its keys behind a prefix: `qat_weight_dtype`."""
    if "qat" not in values:
        return
    qat = values.pop("qat")
    if not isinstance(qat, dict):
        raise UserError(
            f"{path}: qat is {qat!r}, expected a mapping such as `qat: {{weight_dtype: int4, group_size: 32}}`."
        )
    for key, value in qat.items():
        if f"qat_{key}" in values:
            raise UserError(f"{path}: {key!r} under qat and qat_{key} are the same key. Keep one of them.")
        values[f"qat_{key}"] = value


class _Loader(yaml.SafeLoader):
    """Notes which keys stand twice in a mapping, and the text of the values of the outermost one."""

    def __init__(self, stream):
        super().__init__(stream)
        self.repeated_keys: dict[str, list[int]] = {}
        self.texts: dict[str, str] = {}

    def compose_mapping_node(self, anchor):
        node = super().compose_mapping_node(anchor)
        lines: dict[str, list[int]] = {}
        for key, _ in node.value:
            # `<<` takes over the keys of another mapping.
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                lines.setdefault(key.value, []).append(key.start_mark.line + 1)
        self.repeated_keys |= {key: places for key, places in lines.items() if len(places) > 1}
        # The outermost mapping is composed last.
        self.texts = {key.value: value.value for key, value in node.value if isinstance(value, yaml.ScalarNode)}
        return node


def _read_yaml(path: str) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The keys of a file, and those that stand in several lines of it."""
    try:
        with open(path, encoding="utf-8") as file:
            loader = _Loader(file)
            values = loader.get_single_data()
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file.{hint_at_similar(path)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read as YAML: {error}") from error
    if values is None:
        raise UserError(f"--config {path}: the file is empty. A first line: `model_name_or_path: Qwen/Qwen3-0.6B`.")
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected `key: value` lines, found a {type(values).__name__}.")
    for key, value in values.items():
        if not isinstance(key, str):
            raise UserError(
                f"--config {path}: the key {key!r} is no text. YAML takes on, yes and numbers for other things: put it in quotation marks."
            )
        if isinstance(value, bool):
            # Keys that `<<` takes over have none.
            values[key] = loader.texts.get(key, str(value).lower())
    return values, loader.repeated_keys
