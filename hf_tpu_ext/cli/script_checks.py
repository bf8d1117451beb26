"""
What TRL's scripts ignore, or end with a traceback for, is said with what to do: keys that do not go together, reward functions and
splits that are not there, rows that are broken.
"""

import difflib
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ..errors import UserError
from ..hub_names import hint_at_similar


# What TRL's scripts know by name.
_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
# Modules of `datasets` that raise errors of their own: what reads the first lines of files, and what finds no row in them.
_READS_LINES = "datasets.utils.json"
_FIND_NO_ROW = ("datasets.packaged_modules.json.json", "datasets.arrow_reader")
# Files with rows end like this. A dataset's card and hidden files do not.
_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"}


def check_mixture(dataset_name: str, dataset_args) -> None:
    """Refuse keys of `datasets` that do not go together, and those that TRL ignores beside `dataset_name`."""
    share, is_mixture = dataset_args.test_split_size, bool(dataset_args.datasets)
    if share is not None and not 0 < share < 1:
        raise UserError(
            f"test_split_size={share:g} is no share of the rows. Set it between 0 and 1, for example test_split_size: 0.1"
        )
    if share is not None and not is_mixture:
        raise UserError(
            f"test_split_size has no effect beside dataset_name. In a recipe, write in its place:\ndatasets:\n  - path: {dataset_name}\n"
            f"test_split_size: {share}"
        )
    if share is not None and dataset_args.streaming:
        raise UserError(
            "test_split_size takes rows out of a dataset whose size is known, which that of a stream is not. Leave streaming out, or "
            "leave test_split_size out and name a split: dataset_test_split: test"
        )
    if dataset_args.streaming and not is_mixture:
        raise UserError("streaming has no effect beside dataset_name. There the key is dataset_streaming: true")


def check_reward_functions(names: Iterable[str]) -> None:
    """Refuse the name of a reward function that TRL's scripts do not find (`ValueError`): one of theirs, or `module.function`."""
    # TRL's scripts do the same before they import the module.
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


@contextmanager
def naming_broken_rows(script_args, dataset_args) -> Iterator[None]:
    """
    Context in which the datasets of a recipe are read, which TRL's arguments name. Where that fails and one of them is a directory
    here, the first of its `.jsonl` files without a row is named (`ValueError`), the first line that is no JSON, or the columns of
    files that differ. Every other error is upstream's.
    """
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    try:
        yield
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        raised_in = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if not isinstance(error, DatasetGenerationError) and raised_in not in (_READS_LINES, *_FIND_NO_ROW):
            raise
        names = [script_args.dataset_name, *(dataset.path for dataset in dataset_args.datasets or ())]
        files_of_columns = {}
        for file in (file for name in names if name is not None for file in sorted(Path(name).rglob("*.jsonl"))):
            lines = file.read_bytes().splitlines()
            # An empty file beside others of its split is no mistake.
            if raised_in in _FIND_NO_ROW and not any(map(bytes.strip, lines)):
                raise UserError(
                    f"{file} has no row. Write rows into it, each on a line of its own, or remove the file."
                ) from error
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line or "null")
                except ValueError as reason:
                    raise UserError(
                        f"{file}, line {number}, is not JSON: {reason}. Correct the line or remove it: each line is one row."
                    ) from error
                if isinstance(row, dict):
                    files_of_columns.setdefault(", ".join(row), file)
        if isinstance(error.__cause__, CastError):
            told = "; ".join(f"{file} has {columns}" for columns, file in files_of_columns.items())
            raise UserError(
                f"The files of a dataset need the same columns, but {error.__cause__.details()}\n{told}\nRename a column in one of "
                "them, or put files of other rows into a directory of their own."
            ) from error
        raise


def advise_split(split: str, script_args) -> str:
    """
    What to type where the dataset that TRL's arguments name has no `split`. In a directory, `datasets` makes splits of files
    whose names say which rows they have, and leaves others out.
    """
    trains = split == script_args.dataset_train_split
    name, use = ("train", "to train on") if trains else ("test", "to evaluate on")
    advice = (
        f"Name its splits with dataset_train_split (now {script_args.dataset_train_split!r}) and dataset_test_split (now "
        f"{script_args.dataset_test_split!r}){'' if trains else ', or leave out eval_strategy'}."
    )
    if not script_args.dataset_name:
        return advice
    directory = Path(script_args.dataset_name)
    files = sorted(path for path in directory.glob("*") if path.suffix in _SUFFIXES)
    if not files:
        return advice
    holds = f"{directory} holds {', '.join(path.name for path in files[:5])}{', ...' * (len(files) > 5)}"
    if split != name and name in {path.stem for path in files}:
        return f"{holds}: set dataset_{name}_split to {name}. Or: {advice}"
    if {path.stem for path in files} == {"train"}:
        return (
            f"{holds}: put rows to evaluate on beside it, as test{files[0].suffix}; or have a part of them held out, by `datasets: [{{path: "
            f"{directory}}}]` and `test_split_size: 0.1` in a recipe; or leave out eval_strategy."
        )
    setting = "" if split == name else f" and dataset_{name}_split to {name}"
    return f"{holds}: rename the file {use} to {name}{files[0].suffix}{setting}. Or: {advice}"
