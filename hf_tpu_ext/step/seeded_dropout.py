"""Dropout whose masks follow from a seed on the device, wherever in a program they are computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from .random_bits import BY_COLUMN, BY_ROW, scramble


# Odd, as those for rows and columns: another multiplier of MurmurHash3.
_BY_MODULE = 0xC2B2AE35 - 2**32


def seeded_dropout(tensor: Tensor, p: float, seed: Tensor, chip: Tensor | int = 0) -> Tensor:
    """
    Dropout. Whether an element is kept follows from the seed and its place, by a hash.

    XLA's own generator gives a whole tensor at once, which is the same on all chips that run by themselves, and in
    memory before it is used. These numbers are computed where they are used, each by itself, and are the same however
    rows are split over chips.

    Args:
        tensor (`torch.Tensor` of shape `(..., width)`):
            What to drop elements of. Those that are kept are multiplied by `1 / (1 - p)`, with `p` the probability to be dropped.
        seed, chip (`torch.Tensor` of shape `()`, int32):
            The seed, and the number of the chip whose rows these are, where each chip has as many of its own.
    """
    place, size = chip * (tensor.numel() // tensor.shape[-1]), 1
    for dim in range(tensor.ndim - 2, -1, -1):
        along = torch.arange(tensor.shape[dim], dtype=torch.int32, device=tensor.device)
        place = place + along.reshape(-1, *[1] * (tensor.ndim - 1 - dim)) * size
        size *= tensor.shape[dim]
    columns = torch.arange(tensor.shape[-1], dtype=torch.int32, device=tensor.device)
    # Multiply-shift hashing (Dietzfelbinger et al., 1997): of a product of odd numbers, here drawn for rows and columns, the
    # high bits are as good as drawn. A whole hash of each element would take the compiler for TPU much longer.
    bits = (scramble(seed + place * BY_ROW) | 1) * (scramble(seed + columns * BY_COLUMN) | 1)
    # As upstream's noise: 0, or the factor that keeps the mean.
    kept = torch.full((), 1 / (1 - p), dtype=tensor.dtype, device=tensor.device)
    return tensor * torch.where(bits >= round(p * 2**32) - 2**31, kept, torch.zeros_like(kept))


def draw_seeds(backend: Backend, count: int) -> Tensor:
    """
    Draw seeds with the device's random number generator: `(count, 2)`, int32, the same on all chips, each with the
    number of the chip in a region of manual sharding, and with 0 elsewhere.
    """
    sharding = backend.manual_sharding
    seeds = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=backend.device)
    chip = torch.zeros((1,), dtype=torch.int32, device=backend.device)
    if sharding.active:
        chips = torch.arange(backend.num_chips, dtype=torch.int32, device=backend.device)
        seeds, chip = sharding.full_to_shard(seeds), sharding.full_to_shard(chips, by_rows=True)
    return torch.stack([seeds, chip.expand(count)], 1)


@contextmanager
def dropouts_seeded(modules: Sequence[nn.Dropout], seed: Tensor, chip: Tensor) -> Iterator[None]:
    """
    Within this context, dropout modules in training drop what follows from a seed and a chip, as in
    [`seeded_dropout`]; each drops other elements.
    """
    before = [vars(module).get("forward") for module in modules]
    for number, module in enumerate(modules):
        if module.training:
            own = scramble(seed + number * _BY_MODULE % 2**31)
            module.forward = partial(seeded_dropout, p=module.p, seed=own, chip=chip)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
