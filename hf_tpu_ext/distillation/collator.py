"""A teacher's cached answers, on their way through a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .cache import TeacherCache
from .losses import TopK


# What a batch holds of them, each of shape `(batch, length, ...)`.
_KEYS = ("teacher_ids", "teacher_log_probs", "teacher_log_tail")


def collate_with_teacher(
    collator: Callable[[list], Mapping[str, Any]], cache: TeacherCache, temperature: float, top_k: int, examples: list
) -> dict[str, Any]:
    """
    Collate examples, and look each of them up in a teacher's cache.

    Args:
        collator (`Callable`):
            Data collator. Its batches have a row for each example, in their order, padded on the right.
        cache ([`TeacherCache`]): The teacher's answers. A sequence that it does not have is a `ValueError`.
        temperature (`float`): One of the cache's temperatures.
        top_k (`int`): Tokens of each position.
        examples (`list`): Examples with `input_ids`.

    Returns:
        `dict[str, Any]`: The batch, with `teacher_ids` (int32) and `teacher_log_probs` (float32) of shape
        `(batch, length, top_k)`, and `teacher_log_tail` (float32) of shape `(batch, length)`.
    """
    batch = dict(collator(examples))
    rows, length = batch["input_ids"].shape
    of_batch = TopK(
        torch.zeros((rows, length, top_k), dtype=torch.int32),
        torch.zeros((rows, length, top_k)),
        torch.zeros((rows, length)),
    )
    for row, example in enumerate(examples):
        of_example = cache.lookup(example["input_ids"], temperature, top_k)
        for whole, part in zip(of_batch, of_example, strict=True):
            whole[row, : part.shape[0]] = part
    return {**batch, **dict(zip(_KEYS, of_batch, strict=True))}


def cached_teacher(student: nn.Module, inputs: dict[str, Any]) -> TopK:
    """The most likely tokens of a teacher that ran before, which [`collate_with_teacher`] has put into a batch."""
    return TopK(*(inputs.pop(key)[:, :-1].flatten(0, 1) for key in _KEYS))
