"""A line of a recipe's data that is no JSON is named, in place of the error of `datasets`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


@contextmanager
def naming_broken_rows(script_args, dataset_args) -> Iterator[None]:
    """
    Context in which the datasets of a recipe are read, which TRL's arguments name. Where that fails and one of them is a directory here, the first line of
    its `.jsonl` files that is no JSON is named (`ValueError`). Every other error is upstream's.
    """
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except DatasetGenerationError as error:
        names = [script_args.dataset_name, *(dataset.path for dataset in dataset_args.datasets or ())]
        for file in (file for name in names if name is not None for file in sorted(Path(name).rglob("*.jsonl"))):
            for number, line in enumerate(file.read_bytes().splitlines(), start=1):
                try:
                    json.loads(line or "null")
                except ValueError as reason:
                    raise UserError(
                        f"{file}, line {number}, is not JSON: {reason}. Correct the line or remove it: each line is one row."
                    ) from error
        raise
