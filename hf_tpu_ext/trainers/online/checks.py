"""What the trainers that generate their own data cannot do in programs of static shape is refused before a model is loaded."""

from collections.abc import Mapping
from typing import Any

import datasets
from transformers import ProcessorMixin

from ...errors import UserError
from ..checks.datasets import named_datasets


def check_rollouts(trainer_kwargs: Mapping[str, Any], upstream: str) -> None:
    """
    Refuse (`ValueError`) arguments, by name, with which a trainer that generates its own data does not work on XLA. `upstream` is
    its name at upstream.
    """
    if isinstance(trainer_kwargs.get("processing_class"), ProcessorMixin):
        raise UserError(
            f"processing_class is a {type(trainer_kwargs['processing_class']).__name__}, which prepares images. {upstream} trains on text "
            "on XLA. Pass its tokenizer: processing_class=processor.tokenizer."
        )
    for name, dataset in named_datasets(trainer_kwargs).items():
        is_known = isinstance(dataset, (datasets.Dataset, datasets.IterableDataset))
        columns = dataset.column_names if is_known else None
        if columns and "prompt" not in columns:
            raise UserError(
                f"{name} has the columns {columns}, and {upstream} needs 'prompt': a text, or messages that end with the user's. "
                f"Rename a column: dataset.rename_column({columns[0]!r}, 'prompt')."
            )
