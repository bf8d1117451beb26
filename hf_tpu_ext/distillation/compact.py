"""The compact form of a cache: fewer than half the bytes, with rounded log-probabilities."""

from typing import NamedTuple

import numpy as np


class CompactTokens(NamedTuple):
    """
    The most likely tokens of some positions in few bytes.

    Token ids are sorted, and stored exactly by the code of Elias and Fano: their low bits as they are, the rest in unary
    (https://doi.org/10.1145/321812.321820). A log-probability is rounded to one of 256 evenly spaced steps between the
    largest and the smallest one of its position, so it is off by at most 1/510 of what lies between them.

    Args:
        high_bits (`np.ndarray` of shape `(tokens, high_bytes)`):
            The ids' unary part.
        low_bits (`np.ndarray` of shape `(tokens, low_bytes)`):
            Their low bits.
        steps (`np.ndarray` of shape `(tokens, top_k)`):
            Steps from the largest log-probability, in the order of the ids.
        ranges (`np.ndarray` of shape `(tokens, 2)`):
            The largest log-probability, and its distance to the smallest, in float16.
    """

    high_bits: np.ndarray
    low_bits: np.ndarray
    steps: np.ndarray
    ranges: np.ndarray

    @classmethod
    def pack(cls, ids: np.ndarray, values: np.ndarray, vocab_size: int) -> "CompactTokens":
        """
        Make the compact form.

        Args:
            ids (`np.ndarray` of shape `(tokens, top_k)`):
                Token ids, different ones at each position.
            values (`np.ndarray` of shape `(tokens, top_k)`):
                Their log-probabilities, finite, in float16.
            vocab_size (`int`):
                Number of ids that there are.

        Returns:
            [`CompactTokens`]: The compact form.
        """
        tokens, top_k = ids.shape
        order = ids.argsort(axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        values = np.take_along_axis(values, order, axis=1).astype(np.float32)
        low_width, high_width = _widths(top_k, vocab_size)
        unary = np.zeros((tokens, high_width), dtype=bool)
        np.put_along_axis(unary, (ids >> low_width) + np.arange(top_k), True, axis=1)
        low = (ids[..., None] >> np.arange(low_width)) & 1
        largest = values.max(axis=1, keepdims=True)
        spans = (largest - values.min(axis=1, keepdims=True)).astype(np.float16)
        steps = 255 * (largest - values) / np.maximum(spans.astype(np.float32), np.finfo(np.float32).tiny)
        return cls(
            np.packbits(unary, axis=1),
            np.packbits(low.astype(bool).reshape(tokens, -1), axis=1),
            np.rint(steps).clip(max=255).astype(np.uint8),
            np.concatenate([largest.astype(np.float16), spans], axis=1),
        )

    def unpack(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Read the compact form.

        Args:
            vocab_size (`int`):
                Number of ids that there are.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: Token ids in int32 and log-probabilities in float32, both of shape
            `(tokens, top_k)`, most likely first.
        """
        tokens, top_k = self.steps.shape
        low_width, high_width = _widths(top_k, vocab_size)
        unary = np.unpackbits(self.high_bits, axis=1, count=high_width)
        high = unary.nonzero()[1].reshape(tokens, top_k) - np.arange(top_k)
        low = np.unpackbits(self.low_bits, axis=1, count=top_k * low_width).reshape(tokens, top_k, low_width)
        ids = (high << low_width) + low @ (1 << np.arange(low_width))
        largest, spans = self.ranges.astype(np.float32).T[..., None]
        values = largest - spans * (self.steps.astype(np.float32) / 255)
        order = np.argsort(self.steps, axis=1, kind="stable")
        return np.take_along_axis(ids, order, axis=1).astype(np.int32), np.take_along_axis(values, order, axis=1)


def compact_bytes_per_token(top_k: int, vocab_size: int) -> int:
    """
    Size of the compact form of one position.

    Args:
        top_k (`int`):
            Entries of a position.
        vocab_size (`int`):
            Number of ids that there are.

    Returns:
        `int`: Bytes.
    """
    low_width, high_width = _widths(top_k, vocab_size)
    return -(-high_width // 8) + -(-top_k * low_width // 8) + top_k + 4


def _widths(top_k: int, vocab_size: int) -> tuple[int, int]:
    """Low bits of an id, and bits of the unary part of a position."""
    low_width = (vocab_size // top_k).bit_length() - 1
    return low_width, ((vocab_size - 1) >> low_width) + top_k
