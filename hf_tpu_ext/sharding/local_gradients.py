"""Gradients that stay on their chip until an optimizer step needs their sum."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..backends.base import Backend
from ..layers.random_numbers import RandomNumbers
from ..step.gradients import StepGradients


class LocalGradients(StepGradients):
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
                gradients = torch.zeros((backend.num_chips, *parameter.shape), dtype=parameter.dtype)
                self._sums[parameter] = backend.send_rows(gradients, backend.num_chips)
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
                total_gradient = sharding.shard_to_full(gradient[None])
                if total is not None:
                    total_gradient = total + total_gradient
                    total.copy_(torch.zeros_like(total) if sync_gradients else total_gradient)
                if sync_gradients:
                    parameter.grad = total_gradient.sum(0)

    def over_chips(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a number over the chips, without its autograd history; outside of a micro-step it is the sum already."""
        sharding = self._backend.manual_sharding
        return sharding.shard_to_full(value.reshape(1)).sum() if sharding.active else value
