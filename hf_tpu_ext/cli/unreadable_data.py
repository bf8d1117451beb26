"""What to do about data of a recipe that cannot be read: rows that are broken, in place of a traceback, or a split that is not there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


# Of files with rows. A dataset's card and hidden files are none.
_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt"}


@contextmanager
def naming_broken_rows(script_args, dataset_args) -> Iterator[None]:
    """
    Context in which the datasets of a recipe are read, which TRL's arguments name. Where that fails and one of them is a directory
    here, the first line of its `.jsonl` files that is no JSON is named (`ValueError`), or the columns of files that differ. Every
    other error is upstream's.
    """
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    try:
        yield
    except DatasetGenerationError as error:
        names = [script_args.dataset_name, *(dataset.path for dataset in dataset_args.datasets or ())]
        files_of_columns = {}
        for file in (file for name in names if name is not None for file in sorted(Path(name).rglob("*.jsonl"))):
            for number, line in enumerate(file.read_bytes().splitlines(), start=1):
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
