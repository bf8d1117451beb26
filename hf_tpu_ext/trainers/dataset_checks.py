"""Datasets that cannot work are refused before anything is loaded or compiled."""

import datasets
from trl import SFTConfig


_NEEDED = "'messages', 'prompt' and 'completion', 'conversations', 'input_ids'"


def check_dataset(dataset, name: str, args: SFTConfig, has_formatting_func: bool) -> None:
    """
    Check that a dataset has rows and the columns that supervised fine-tuning needs.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset to check. Other types are left to upstream.
        name (`str`):
            What to call it: `"train_dataset"` or `"eval_dataset"`.
        args ([`~trl.SFTConfig`]):
            Arguments of the run.
        has_formatting_func (`bool`):
            Whether a `formatting_func` makes the text.

    Raises:
        `ValueError`: The dataset is empty or none of its columns is text to train on.
    """
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return
    if isinstance(dataset, datasets.Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} is empty: it has no rows. Check the split and the filters that made it.")
    columns = dataset.column_names
    if columns is None:
        first = next(iter(dataset), None)
        if first is None:
            raise ValueError(
                f"{name} is empty: its stream yields no row. Check the split and the filters that made it."
            )
        columns = list(first)
    skips_preparation = (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
    if has_formatting_func or skips_preparation or {"image", "images"} & set(columns):
        return
    known = {args.dataset_text_field, "messages", "conversations", "input_ids"} & set(columns)
    if not known and not {"prompt", "completion"} <= set(columns):
        raise ValueError(
            f"{name} has no column to train on. It has {columns}; needed is the text column "
            f"({args.dataset_text_field!r}) or {_NEEDED}. Name the text column with dataset_text_field=..., rename a "
            "column, or pass a formatting_func."
        )
