"""Parts of a program that each chip runs by itself, with gradients through them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..backends.base import Backend
from ..layers.chunked_head import head_wrapped_by


class FullToShard(torch.autograd.Function):
    """
    [`ManualSharding.full_to_shard`] with a gradient: that of rows stays with the rows, that of a replicated tensor is summed
    over chips.
    """

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, backend: Backend, by_rows: bool) -> torch.Tensor:
        ctx.backend, ctx.by_rows = backend, by_rows
        return backend.manual_sharding.full_to_shard(tensor, by_rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.by_rows:
            return ctx.backend.manual_sharding.shard_to_full(gradient), None, None
        return ctx.backend.manual_sharding.shard_to_full(gradient[None]).sum(0), None, None


class ShardToFull(torch.autograd.Function):
    """[`ManualSharding.shard_to_full`] with a gradient."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
        ctx.backend = backend
        # What is not trained on, such as the entropy, has no gradient to compute.
        ctx.set_materialize_grads(False)
        return backend.manual_sharding.shard_to_full(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if gradient is None else ctx.backend.manual_sharding.full_to_shard(gradient, by_rows=True), None


def score_per_chip(backend: Backend, score: Callable, hidden, weight, bias, targets, *settings: Any) -> tuple:
    """
    Compute `score` of the tokens of each chip on that chip, with the whole head. All arguments but `backend` and `score` are
    those of `trl.kernels.ChunkedLogProbFunction.apply`; of what `score` is given, `settings` are as they are here.
    """
    if hidden.shape[0] % backend.num_chips:
        return score(hidden, weight, bias, targets, *settings)
    with backend.manual_sharding.region():
        outputs = score(
            FullToShard.apply(hidden, backend, True),
            FullToShard.apply(weight, backend, False),
            None if bias is None else FullToShard.apply(bias, backend, False),
            backend.manual_sharding.full_to_shard(targets, by_rows=True),
            *settings,
        )
    return tuple(None if output is None else ShardToFull.apply(output, backend) for output in outputs)


def score_tokens_per_chip(backend: Backend) -> AbstractContextManager[None]:
    """
    Within this context, TRL's fused language model head scores tokens on the chip that has them, with the whole head.
    Left to the partitioner, tokens and slices of the head cross between chips several times over.
    """
    return head_wrapped_by(lambda score: partial(score_per_chip, backend, score))
