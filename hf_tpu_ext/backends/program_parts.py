"""What a program may have besides operators: loops, kernels, and regions that each chip runs on its own shard."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from ..temporarily import temporarily


class Loops:
    """Loops in plain PyTorch. Autograd does not follow them; inside a body gradients can be computed."""

    #: Whether a loop is part of a program that is recorded. Elsewhere its iterations run one after the other.
    in_programs = False

    def scan(
        self,
        body: Callable,
        carry: tuple,
        tensors: tuple[torch.Tensor, ...],
        reverse: bool = False,
        until: bool = False,
    ) -> tuple[tuple, tuple]:
        """
        Run a function over the first dimension of tensors, one entry after the other.

        Args:
            body (`Callable`):
                Called as `body(carry, entries)` with tuples of tensors. Returns what is carried on, of the same shapes and
                dtypes, and the iteration's results.
            carry (`tuple[torch.Tensor, ...]`): What the first iteration gets.
            tensors (`tuple[torch.Tensor, ...]` of shapes `(iterations, ...)`): What to go through.
            reverse (`bool`, *optional*, defaults to `False`):
                Whether to begin with the last entry. The results are in the order of the entries all the same.
            until (`bool`, *optional*, defaults to `False`):
                Whether the loop ends as soon as the first tensor that is carried, bool of shape `()`, is true. The results of
                iterations that do not run are zeros.

        Returns:
            `tuple`: What the last iteration carried on, and the results of all iterations, stacked.
        """
        results = []
        order = slice(None, None, -1 if reverse else 1)
        with torch.no_grad():
            for entries in list(zip(*tensors, strict=True))[order]:
                if until and results and carry[0]:
                    results.append(tuple(map(torch.zeros_like, results[-1])))
                    continue
                carry, result = body(carry, entries)
                results.append(result)
            results = results[order]
            return carry, tuple(torch.stack(result) for result in zip(*results, strict=True))

    def scan_rows(
        self,
        body: Callable,
        carry: tuple,
        tensors: tuple[torch.Tensor, ...],
        row: torch.Tensor,
        count: int,
        into: tuple[torch.Tensor, ...] = (),
        reverse: bool = False,
    ) -> tuple[tuple, torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """
        Run a function over successive rows of tensors. In the body of another loop, unlike [`~Loops.scan`] of a part of them, it
        copies no more than a row.

        Args:
            body (`Callable`):
                Called as `body(carry, rows)`. Returns what is carried on, what is put into the same row of `into`, and the
                iteration's results.
            carry (`tuple`): What the first iteration gets.
            tensors (`tuple[torch.Tensor, ...]` of shapes `(rows, ...)`): What to go through.
            row (`torch.Tensor` of shape `()`, int32): The first row, on the device.
            count (`int`): How many rows.
            into (`tuple[torch.Tensor, ...]` of shapes `(rows, ...)`, *optional*):
                Not to be used afterwards, but what is returned.
            reverse (`bool`, *optional*, defaults to `False`): Whether the rows are `row`, `row - 1` and so on.

        Returns:
            `tuple`: What the last iteration carried on, the row after it, `into`, and the results of all, stacked in their order.
        """

        def row_body(state: tuple, _) -> tuple[tuple, tuple]:
            row, carry, tensors, into = state
            carry, put, results = body(carry, tuple(self.take_rows(tensor, row, 1)[0] for tensor in tensors))
            into = tuple(self.put_rows(whole, row, part[None]) for whole, part in zip(into, put, strict=True))
            return (row - 1 if reverse else row + 1, carry, tensors, into), results

        iterations = torch.arange(count, device=row.device)
        (row, carry, _, into), results = self.scan(row_body, (row, carry, tensors, into), (iterations,))
        return carry, row, into, results

    def take_rows(self, tensor: torch.Tensor, start: torch.Tensor, size: int) -> torch.Tensor:
        """Take `size` successive rows of a tensor, from row `start` on: `(rows, ...)` and `()`, on the device."""
        return tensor.detach()[start : start + size]

    def put_rows(self, tensor: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """
        Replace successive rows, beginning with row `start`, of shape `()` on the device, of a tensor `(rows, ...)`.
        The tensor is not to be used afterwards, but what is returned.
        """
        return self.put_block(tensor, rows, start, dim=0)

    def put_block(self, tensor: torch.Tensor, block: torch.Tensor, start: torch.Tensor, dim: int) -> torch.Tensor:
        """
        Replace a block of a tensor, of as many dimensions, which begins at `start` of dimension `dim`, on the device, int32
        of shape `()`, and at the first element of the others. The tensor is not to be used afterwards, but what is returned.
        """
        tensor.detach().narrow(dim, int(start), block.shape[dim]).copy_(block)
        return tensor

    def prevent_hoisting(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Keep the conversion of a slice (rows from [`~Loops.take_rows`], or an entry of [`~Loops.scan`]) inside the
        loop's body. The compiler for TPU would convert the whole tensor before the loop, and have it in memory in both
        dtypes.
        """
        return tensor


class Kernels:
    """No kernels: models compute with what PyTorch has."""

    #: What kernels are lowered for here: `"tpu"`, or `"cpu"` where they are interpreted. `None`: there are none.
    platform: str | None = None
    #: Where they are kept, if anywhere.
    directory: Path | None = None

    def round_down(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Round float32 towards zero, to numbers that bfloat16 holds, and keep it float32. A compiler that may compute more
        exactly than it was told would leave out a conversion there and back.
        """
        raise NotImplementedError

    def look_up(self, codes: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
        """Entries of a table by their numbers, int32; the table has a power of two of them, a few, in float32."""
        return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes]

    def call(self, program: bytes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call a serialized program with device tensors. Autograd does not follow it. It is traced like an operator."""
        raise NotImplementedError


class ReadInRegion(RuntimeError):
    """What runs in a manual region needs a value on the host, and nothing of a region can be run before its end. Raised at its end."""


class ManualSharding:
    """
    Regions in which shapes are those of one shard, and no collective runs that is not asked for.

    This one is for a single chip, whose shard is the full tensor.
    """

    #: Whether what is traced now is in such a region.
    active: bool = False

    def region(self, active: bool = True) -> AbstractContextManager[None]:
        """
        Within this context, what is traced is in a manual region; it has no effect with `active=False`. Raises [`ReadInRegion`] at
        a sync, or at an operator that runs on the host.
        """
        return temporarily(self, active=self.active or active)

    def full_to_shard(self, tensor: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
        """
        Take a device tensor into a manual region. Every tensor that the region uses enters this way, without its
        autograd history. It is replicated, or with `by_rows` sharded by its first dimension: the region then sees the
        chip's own rows only.
        """
        return tensor.detach()

    def shard_to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Take the chip's shard, of shape `(rows, ...)`, out of a manual region. The result, of shape `(chips * rows,
        ...)`, has the shards of all chips one after the other, each still on its chip.
        """
        return tensor.detach()
