"""Synthetic rows of given lengths, in place of a dataset."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_rows(directory: Path, lengths: Sequence[int], values: dict[str, Any]) -> dict[str, str]:
    """
    Write a dataset with a row of each length for a recipe with these keys. Returns the keys that name the dataset, in
    place of those of the recipe.
    """
    masks = {"completion_only_loss": "completion_mask", "assistant_only_loss": "assistant_masks"}
    columns = ["input_ids", *(column for setting, column in masks.items() if values.get(setting))]
    # `hf-tpu pretrain` cuts documents into rows: here is more than enough text for one.
    rows = [{column: [1] * length for column in columns} | {"text": "a " * (2 * length)} for length in lengths]
    for split in ("train", "test"):
        lines = (json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"dataset_name": str(directory), "dataset_train_split": "train", "dataset_test_split": "test"}
