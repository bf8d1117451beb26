"""Data of a recipe that cannot be read: the line that is no JSON, or the file with other columns, in place of a traceback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


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
