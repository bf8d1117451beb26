"""Manual sharding: a region of a program that each chip runs on its own shard, as in JAX's `shard_map`."""

from contextlib import AbstractContextManager

import torch

from ..temporarily import temporarily


class ManualSharding:
    """
    Regions in which shapes are those of one shard, and no collective runs that is not asked for.

    This one is for a single chip, whose shard is the full tensor.
    """

    #: Whether what is traced now is in such a region.
    active: bool = False

    def region(self, active: bool = True) -> AbstractContextManager[None]:
        """Within this context, what is traced is in a manual region; it has no effect with `active=False`."""
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
