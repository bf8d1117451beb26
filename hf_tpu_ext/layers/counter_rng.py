"""Random numbers that follow from a seed on the device and a place: each is computed where it is used."""

import torch
from torch import Tensor


# Odd, so that different places have different numbers: 2**32 over the golden ratio, and a multiplier of MurmurHash3.
BY_ROW, BY_COLUMN = (number - 2**32 for number in (0x9E3779B9, 0x85EBCA6B))


def scramble(bits: Tensor) -> Tensor:
    """A hash of int32 numbers."""
    # lowbias32 of https://nullprogram.com/blog/2018/07/31/ on the numbers that there are: PyTorch's are signed.
    for places, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        bits = (bits ^ _shift(bits, places)) * factor
    return bits ^ _shift(bits, 16)


def _shift(bits: Tensor, by: int) -> Tensor:
    # By a tensor: torch_xla divides where the number of places is a Python number, and chips have no division of integers.
    places = torch.full((), by, dtype=bits.dtype, device=bits.device)
    return torch.bitwise_right_shift(bits & 0x7FFFFFFF, places)


def gumbel(shape: tuple[int, int], seed: Tensor) -> Tensor:
    """
    Numbers of the Gumbel distribution in float32: `(rows, columns)`, all finite. They follow from a seed, int32 of shape `()`,
    and the place, and are the same however rows are split over chips.
    """
    # From 1: the hash of 0 is 0, and a seed may be 0.
    rows, columns = (torch.arange(1, size + 1, dtype=torch.int32, device=seed.device) for size in shape)
    bits = scramble(scramble(seed + rows[:, None] * BY_ROW) + columns * BY_COLUMN)
    # `-log(-log(1 - x))` of a uniform x, since the large numbers, which choose unlikely tokens, then come from an x near 0, where
    # float32 is fine. Near 1 its steps are 2**-24: of as many columns as a vocabulary has, one would often be infinite.
    portion = (((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    return -(-(-portion).log1p()).log()
