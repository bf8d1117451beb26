"""A teacher's cached answers, on their way through a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .cache import TeacherCache
from .losses import TopK


# What a batch holds of them, each of shape `(batch, length, ...)`.
_KEYS = ("teacher_ids", "teacher_log_probs", "teacher_log_tail")


class TeacherCollator:
    """
    Wraps a data collator and looks every row up in a teacher's cache, at one of its temperatures, with `top_k` tokens
    of each position or all that are cached. The collator's batches have a row for each example, in their order, padded
    on the right.
    """

    def __init__(
        self,
        collator: Callable[[list], Mapping[str, Any]],
        cache: TeacherCache,
        temperature: float,
        top_k: int | None = None,
    ):
        self.collator = collator
        self.cache = cache
        self.temperature = temperature
        self.top_k = cache.manifest.top_k if top_k is None else top_k

    def __call__(self, examples: list) -> dict[str, Any]:
        """
        Collate examples with `input_ids`; a `ValueError` names a sequence that is not in the cache. The batch has
        `teacher_ids` (int32) and `teacher_log_probs` (float32) of shape `(batch, length, top_k)` as well, and
        `teacher_log_tail` (float32) of shape `(batch, length)`.
        """
        batch = dict(self.collator(examples))
        rows, length = batch["input_ids"].shape
        padded = TopK(
            torch.zeros((rows, length, self.top_k), dtype=torch.int32),
            torch.zeros((rows, length, self.top_k)),
            torch.zeros((rows, length)),
        )
        for row, example in enumerate(examples):
            found = self.cache.lookup(example["input_ids"], self.temperature, self.top_k)
            for whole, part in zip(padded, found, strict=True):
                whole[row, : part.shape[0]] = part
        return {**batch, **dict(zip(_KEYS, padded, strict=True))}


def cached_teacher(student: nn.Module, inputs: dict[str, Any]) -> TopK:
    """The most likely tokens of a teacher that ran before, which [`TeacherCollator`] has put into a batch."""
    return TopK(*(inputs.pop(key)[:, :-1].flatten(0, 1) for key in _KEYS))
