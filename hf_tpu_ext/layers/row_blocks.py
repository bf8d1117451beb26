"""Rows of a batch in blocks, one after the other: what a layer computes between its input and its output stays small."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backends.base import Backend


# Tokens of a block at most, where rows are not longer: the compiler for TPU writes activations of more to HBM, and reads them
# again. With less than a quarter, products are small, and weights read often.
_BLOCK_TOKENS = 4096


class RowBlocks:
    """
    How a batch of so many rows, each of which is in one block, is cut into blocks, and the loop over them. With one
    block nothing is cut, and there is no loop: so it is unless `is_enabled`, and where the partitioner splits rows
    over chips, since those of a block would be on some of the chips.
    """

    def __init__(self, backend: Backend, rows: int, length: int, is_enabled: bool = True):
        self.backend, self._rows = backend, rows
        has_own_rows = backend.num_chips == 1 or backend.manual_sharding.active
        #: How many blocks there are, of the same number of rows.
        self.count = 1
        if is_enabled and has_own_rows:
            most = max(_BLOCK_TOKENS, length)
            sizes = (size for size in range(rows, 0, -1) if rows % size == 0)
            # Where none is good, as with many short rows that are a prime number, there is one block.
            self.count = rows // next((size for size in sizes if most // 4 <= size * length <= most), rows)

    def cut(self, tensor: Tensor) -> Tensor:
        """From `(rows, ...)` to `(blocks, rows of a block, ...)`."""
        return tensor if self.count == 1 else tensor.unflatten(0, (self.count, -1))

    def join(self, tensor: Tensor) -> Tensor:
        """What [`~RowBlocks.cut`] has cut."""
        return tensor if self.count == 1 else tensor.flatten(0, 1)

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether each row of the batch has its own part of a tensor; others, as positions, may be for all rows."""
        return tensor.ndim > 1 and len(tensor) == self._rows

    def zeros(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What sums over blocks begin with, for results of the shapes of `tensors`: none if there is one block."""
        if self.count == 1:
            return ()
        return tuple(torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in tensors)

    def add(self, sums: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums with what was found for a block."""
        if self.count == 1:
            return tuple(parts)
        return tuple(total + part for total, part in zip(sums, parts, strict=True))

    def loop(self, body: Callable, carry: tuple, entries: tuple) -> tuple:
        """
        Call `body(carry, (number, *entries))` for each block, with what the last one carried on, as [`Loops.scan`] does.
        The number is `None` if there is one block.
        """
        if self.count == 1:
            return body(carry, (None, *entries))
        numbers = torch.arange(self.count, dtype=torch.int32, device=self.backend.device)
        return self.backend.loops.scan(body, carry, (numbers, *entries))
