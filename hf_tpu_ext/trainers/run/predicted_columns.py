"""Predictions of a batch that was padded have the columns that upstream's collator gives the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...data.static_shapes import as_collated


def find_added(inputs: Mapping[str, Any], device_batch: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many columns the keys of a batch had when it was collated, and how many they had on the device, if more."""
    columns = {
        key: (value.shape[1], device_batch[key].shape[1])
        for key, value in as_collated(inputs).items()
        if isinstance(value, torch.Tensor) and value.ndim > 1 and key in device_batch
    }
    return {key: (before, after) for key, (before, after) in columns.items() if before < after}


def without_added(
    predictions: Any,
    labels: Any,
    added_columns: Mapping[str, tuple[int, int]],
    label_names: Sequence[str],
    are_text: bool,
) -> tuple[Any, Any]:
    """
    Predictions and labels of a batch, as upstream's `prediction_step` returns them, without the columns that [`find_added`]
    has found. Values with a column less than the batch, such as those that are shifted, lose as many. Predictions that
    `are_text` have columns of their own, and `Seq2SeqTrainer` gives labels at least as many.
    """
    if not added_columns:
        return predictions, labels
    if are_text:
        before, after = added_columns.get(label_names[0], (0, 0))
        return predictions, _cut(labels, (max(before, min(predictions.shape[1], after)), after))
    if isinstance(labels, tuple):
        labels = tuple(_cut(value, added_columns.get(name)) for name, value in zip(label_names, labels, strict=True))
    elif labels is not None:
        labels = _cut(labels, added_columns.get(label_names[0]))
    # Logits have the columns of the labels: a decoder may have its own.
    of_logits = added_columns.get(label_names[0]) if label_names else None
    if isinstance(predictions, (list, tuple)):
        others = (_cut_states(value, added_columns) for value in predictions[1:])
        first = (
            _cut(value, of_logits) if of_logits else _cut_states(value, added_columns) for value in predictions[:1]
        )
        return type(predictions)([*first, *others]), labels
    return _cut(predictions, of_logits) if of_logits else _cut_states(predictions, added_columns), labels


def _cut_states(value: Any, added_columns: Mapping[str, tuple[int, int]]) -> Any:
    """A value for each token of the input, such as hidden states, or several of them. Classes of a row may be as many."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cut_states(part, added_columns) for part in value)
    is_of_tokens = isinstance(value, torch.Tensor) and value.ndim > 2
    return _cut(value, added_columns.get("input_ids")) if is_of_tokens else value


def _cut(value: Any, columns: tuple[int, int] | None) -> Any:
    if columns is None or not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    before, after = columns
    is_of_tokens = after - 1 <= value.shape[1] <= after
    return value[:, : value.shape[1] - (after - before)] if is_of_tokens else value
