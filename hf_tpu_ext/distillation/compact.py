"""The compact form of a cache: fewer than half the bytes, with rounded log-probabilities."""

import math
from typing import NamedTuple

import numpy as np

from ..errors import UserError


# What [`TeacherRows`] has for the logarithm of 0, and the step that stands for it.
_NEVER, _NEVER_STEP = np.float32(np.finfo(np.float16).min), 255
# The widest range of log-probabilities of a position: each is kept to half of a 255th of it.
_WIDEST = 255


class CompactTokens(NamedTuple):
    """
    The most likely tokens of some positions, in arrays of shape `(tokens, top_k)` that compress well.

    Token ids are sorted and kept exactly, as the gaps between them, a byte in each array: compression leaves little of the
    higher ones. A log-probability is rounded to one of 256 evenly spaced steps between the largest and the smallest one of
    its position, so it is off by at most 1/510 of what lies between them. Tokens that the teacher never says are no part of
    that: where there are any, the last step stands for them, and the others have 255.

    Args:
        low (`np.ndarray`), middle (`np.ndarray`), high (`np.ndarray`): Bytes of the gaps between ids.
        steps (`np.ndarray`): Steps from the largest log-probability, in the order of the ids, in uint8.
        ranges (`np.ndarray` of shape `(tokens, 2)`):
            The largest log-probability, and its distance to the smallest, in float16; negative where there are tokens that the
            teacher never says.
    """

    low: np.ndarray
    middle: np.ndarray
    high: np.ndarray
    steps: np.ndarray
    ranges: np.ndarray

    @classmethod
    def pack(cls, ids: np.ndarray, values: np.ndarray) -> "CompactTokens":
        """
        The compact form of different ids below 2^24 and their log-probabilities, both `(tokens, top_k)`. `ValueError` where steps
        would be too wide.
        """
        assert ids.max() < 2**24
        order = ids.argsort(axis=1)
        gaps = np.diff(np.take_along_axis(ids, order, axis=1), axis=1, prepend=0)
        values = np.take_along_axis(values, order, axis=1).astype(np.float32)
        largest = values.max(axis=1, keepdims=True)
        never = values <= _NEVER
        values = np.where(never, largest, values)
        spans = (largest - values.min(axis=1, keepdims=True)).astype(np.float16)
        if spans.max() > _WIDEST:
            raise UserError(
                f"The teacher's log-probs of one position lie {spans.max():.0f} apart, and the compact form would keep them in 255 "
                "steps: too far from each other to be of use. Leave out --compact."
            )
        has_never = never.any(axis=1, keepdims=True)
        last = _last_step(has_never)
        steps = last * (largest - values) / np.maximum(spans.astype(np.float32), np.finfo(np.float32).tiny)
        steps = np.minimum(np.rint(steps), last)
        return cls(
            *((gaps >> shift).astype(np.uint8) for shift in (0, 8, 16)),
            np.where(never, _NEVER_STEP, steps).astype(np.uint8),
            np.concatenate([largest.astype(np.float16), np.where(has_never, -spans, spans)], axis=1),
        )

    def unpack(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids in int32 and log-probabilities in float32, both `(tokens, top_k)`, most likely first."""
        low, middle, high = (part.astype(np.int32) for part in self[:3])
        ids = (low | middle << 8 | high << 16).cumsum(axis=1, dtype=np.int32)
        largest, spans = self.ranges.astype(np.float32).T[..., None]
        # Also of a span of 0.
        has_never = np.signbit(spans)
        values = largest - np.abs(spans) * (self.steps.astype(np.float32) / _last_step(has_never))
        values = np.where(has_never & (self.steps == _NEVER_STEP), _NEVER, values)
        order = np.argsort(self.steps, axis=1, kind="stable")
        return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _last_step(has_never: np.ndarray) -> np.ndarray:
    """The step of the smallest log-probability."""
    return np.where(has_never, _NEVER_STEP - 1, _NEVER_STEP).astype(np.float32)


def compact_bytes_per_token(top_k: int, vocab_size: int) -> int:
    """Bytes that one position takes when it is compressed: ids that are spread evenly, which compress worst."""
    return math.ceil(top_k * (2 + math.log2(vocab_size / top_k)) / 8) + top_k + 4
