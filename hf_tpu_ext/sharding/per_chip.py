"""Parts of a program that each chip runs by itself, with gradients through them, or with gradients that wait on their chip."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..backends.base import Backend
from ..layers.chunked_head import head_wrapped_by
from ..layers.random_numbers import RandomNumbers
from ..step.train_step import GradientSums
from .mesh import AXES


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


class LocalGradients(GradientSums):
    """
    Accumulates gradients on each chip, and adds them up over the chips once per optimizer step.

    Each chip runs the forward and backward pass by itself (torch_xla's manual sharding, what JAX calls `shard_map`) on
    its own rows, so nothing crosses between chips but what is meant to. With accumulation it keeps its gradients in a
    tensor of shape `(chips, ...)` that is split over the chips. The last micro-step sums the first dimension: one
    all-reduce for each trainable parameter. Left to the partitioner, gradients would be added up over the chips at the
    end of every micro-step's program, since a program's results are whole tensors.

    Only weights that are trained are entered; whatever else is whole on every chip can be used as it is. Each chip draws
    the random numbers of its own rows, see [`~hf_tpu_ext.layers.random_numbers.RandomNumbers`].
    """

    def __init__(self, model: nn.Module, backend: Backend, accumulates: bool):
        super().__init__(model, accumulates=False)
        self._backend = backend
        self._places: list[tuple[dict[str, nn.Parameter], str, nn.Parameter]] = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._sums: dict[nn.Parameter, torch.Tensor | None] = dict.fromkeys(place[2] for place in self._places)
        if accumulates:
            for parameter in self._sums:
                # Not sent: on the host they would take the memory of the gradients of all chips.
                shape = backend.num_chips, *parameter.shape
                self._sums[parameter] = sums = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                backend.shard(sums, (AXES, *[None] * parameter.ndim))
        # Of shapes `(chips, ...)`.
        self.tensors = [total for total in self._sums.values() if total is not None]

    @contextmanager
    def micro_step(self, sync_gradients: bool) -> Iterator[None]:
        """
        Run a forward and backward pass on each chip by itself. After the last one of an optimizer step the
        parameters have their gradient, and the sums begin anew.
        """
        sharding = self._backend.manual_sharding
        local = {parameter: sharding.full_to_shard(parameter).requires_grad_() for parameter in self._sums}
        for parameters, name, parameter in self._places:
            parameters[name] = local[parameter]
        random_numbers = RandomNumbers.current(self._backend.device)
        try:
            with sharding.region(), random_numbers.in_region(sharding, self._backend.num_chips):
                yield
        finally:
            for parameters, name, parameter in self._places:
                parameters[name] = parameter
        for parameter, total in self._sums.items():
            gradient = local[parameter].grad
            if gradient is not None:
                self._used.add(parameter)
                total_gradient = sharding.shard_to_full(gradient[None])
                if total is not None:
                    total_gradient = total + total_gradient
                    total.copy_(torch.zeros_like(total) if sync_gradients else total_gradient)
                if sync_gradients:
                    parameter.grad = total_gradient.sum(0)
            elif sync_gradients and total is not None and parameter in self._used:
                # The last micro-step has not used it, as a vision tower in a batch without images.
                parameter.grad = total.sum(0)
                total.copy_(torch.zeros_like(total))

    def add_up(self) -> None:
        """Add the sums up over the chips, for other [`GradientSums`] to go on with them."""
        self.sums = {parameter: total.sum(0) for parameter, total in self._sums.items() if total is not None}

    def over_chips(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a number over the chips, without its autograd history; outside of a micro-step it is the sum already."""
        sharding = self._backend.manual_sharding
        return sharding.shard_to_full(value.reshape(1)).sum() if sharding.active else value
