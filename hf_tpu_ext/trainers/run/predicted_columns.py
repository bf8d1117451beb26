"""Predictions of a batch that was padded have the columns that upstream's collator gives the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...data import as_collated


def find_added(inputs: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many columns the keys of a batch had when it was collated, and how many they had on the device, if more."""
    columns = {
        key: (value.shape[1], sent[key].shape[1])
        for key, value in as_collated(inputs).items()
        if isinstance(value, torch.Tensor) and value.ndim > 1 and key in sent
    }
    return {key: (collated, computed) for key, (collated, computed) in columns.items() if collated < computed}


def without_added(
    predictions: Any, labels: Any, added: Mapping[str, tuple[int, int]], label_names: Sequence[str], are_text: bool
) -> tuple[Any, Any]:
    """
    Predictions and labels of a batch, as upstream's `prediction_step` returns them, without the columns that [`find_added`]
    has found. Values with a column less than the batch, such as those that are shifted, lose as many. Predictions that
    `are_text` have columns of their own, and `Seq2SeqTrainer` gives labels at least as many.
    """
    if not added:
        return predictions, labels
    if are_text:
        collated, computed = added.get(label_names[0], (0, 0))
        return predictions, _cut(labels, (max(collated, min(predictions.shape[1], computed)), computed))
    if isinstance(labels, tuple):
        labels = tuple(_cut(value, added.get(name)) for name, value in zip(label_names, labels, strict=True))
    elif labels is not None:
        labels = _cut(labels, added.get(label_names[0]))
    # Logits have the columns of the labels: a decoder may have its own.
    of_logits = added.get(label_names[0]) if label_names else None
    if isinstance(predictions, (list, tuple)):
        others = (_cut_states(value, added) for value in predictions[1:])
        first = (_cut(value, of_logits) if of_logits else _cut_states(value, added) for value in predictions[:1])
        return type(predictions)([*first, *others]), labels
    return _cut(predictions, of_logits) if of_logits else _cut_states(predictions, added), labels


def _cut_states(value: Any, added: Mapping[str, tuple[int, int]]) -> Any:
    """A value for each token of the input, such as hidden states, or several of them. Classes of a row may be as many."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cut_states(part, added) for part in value)
    is_of_tokens = isinstance(value, torch.Tensor) and value.ndim > 2
    return _cut(value, added.get("input_ids")) if is_of_tokens else value


def _cut(value: Any, columns: tuple[int, int] | None) -> Any:
    if columns is None or not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    collated, computed = columns
    is_of_tokens = computed - 1 <= value.shape[1] <= computed
    return value[:, : value.shape[1] - (computed - collated)] if is_of_tokens else value
