"""Loops inside a program, and what their bodies take and put."""

from collections.abc import Callable

import torch


class Loops:
    """
    Loops in plain PyTorch, one turn after the other. Autograd follows none of these methods; inside a loop's body gradients
    can be computed.
    """

    def scan(
        self,
        body: Callable,
        carry: tuple,
        tensors: tuple[torch.Tensor, ...],
        reverse: bool = False,
    ) -> tuple[tuple, tuple]:
        """
        Run a function over the first dimension of tensors, one entry after the other.

        Args:
            body (`Callable`):
                Called as `body(carry, entries)` with tuples of tensors. Returns what is carried on, of the same shapes and
                dtypes, and the turn's results.
            carry (`tuple[torch.Tensor, ...]`):
                What the first turn gets.
            tensors (`tuple[torch.Tensor, ...]` of shapes `(turns, ...)`):
                What to go through.
            reverse (`bool`, *optional*, defaults to `False`):
                Whether to begin with the last entry. The results are in the order of the entries all the same.

        Returns:
            `tuple`: What the last turn carried on, and the results of all turns, stacked.
        """
        results = []
        order = slice(None, None, -1 if reverse else 1)
        with torch.no_grad():
            for entries in list(zip(*tensors, strict=True))[order]:
                carry, result = body(carry, entries)
                results.append(result)
            results = results[order]
            return carry, tuple(torch.stack(result) for result in zip(*results, strict=True))

    def take_rows(self, tensor: torch.Tensor, start: torch.Tensor, size: int) -> torch.Tensor:
        """
        Take successive rows, from where a tensor on the device says.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`):
                Where to take them from.
            start (`torch.Tensor` of shape `()`):
                The first one.
            size (`int`):
                How many.

        Returns:
            `torch.Tensor` of shape `(size, ...)`: The rows.
        """
        return tensor.detach()[start : start + size]

    def put_rows(self, tensor: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """
        Replace successive rows, from where a tensor on the device says.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`):
                Where to put them. It is not to be used afterwards.
            start (`torch.Tensor` of shape `()`):
                The first one.
            rows (`torch.Tensor` of shape `(size, ...)`):
                The new rows.

        Returns:
            `torch.Tensor` of shape `(rows, ...)`: The tensor with the new rows.
        """
        tensor.detach()[start : start + rows.shape[0]] = rows
        return tensor

    def prevent_hoisting(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Keep the conversion of a slice inside the loop's body. The compiler for TPU would convert the whole tensor before the
        loop, and have it in memory in both dtypes.

        Args:
            tensor (`torch.Tensor`):
                Rows from [`~Loops.take_rows`], or an entry of [`~Loops.scan`].

        Returns:
            `torch.Tensor`: The same.
        """
        return tensor
