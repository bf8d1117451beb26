"""A training step, as a function: what is computed in it, in this order; and its gradients, which may last for several micro-steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..backends.processes import ALONE, Processes


#: The last micro-step of an optimizer step, which updates the weights, and those before it, which only add to the gradients.
OPTIMIZER_STEP, MICRO_STEP = "training step", "micro-step"


def train_step(
    forward_backward: Callable[[nn.Module, dict[str, Any], Tensor | int | None], Tensor],
    gradients: "GradientSums",
    add_loss: Callable[[Tensor, bool], None],
    clip: Callable[[nn.Module], Tensor],
    update: Callable[[Tensor], None],
    model: nn.Module,
    batch: dict[str, Any],
    numbers: dict[str, Any],
    sync_gradients: bool,
) -> dict[str, Tensor]:
    """
    A micro-step of training as one program; the last one of an optimizer step also updates the weights.

    Everything that lasts is written in place: weights, gradients that are kept, moments, the average of the weights, sums for the log.
    Where code of the user's runs between the backward pass and the update, upstream's loop calls the same stages one by one.

    Args:
        forward_backward (`Callable`):
            Upstream's loss as upstream has written it, and its backward pass, of the model, the batch and `numbers["num_items_in_batch"]`.
            Returns the loss of the micro-step, detached, of all chips.
        gradients ([`GradientSums`]):
            Where gradients are between micro-steps. With manual sharding they are summed over the chips in the last one.
        add_loss (`Callable`):
            Adds the loss to the sums of the log; called with whether the micro-step closes an optimizer step.
        clip (`Callable`):
            Clips the gradients, and returns their norm before.
        update (`Callable`):
            Updates the weights, the moments and the average of the weights, given `numbers["update"]`, which are those of
            [`~hf_tpu_ext.step.optimizer.LazyAdamW`].
        model ([`~torch.nn.Module`]):
            The model that is trained.
        batch (`dict[str, Any]`):
            Its tensors are on the device, of a declared shape.
        numbers (`dict[str, Any]`):
            What differs from step to step, as tensors on the device: learning rates, the number of tokens and of micro-steps, a seed.
        sync_gradients (`bool`):
            Whether the micro-step closes an optimizer step.

    Returns:
        `dict[str, torch.Tensor]`: `"grad_norm"` of shape `()`, float32, of the last micro-step; nothing of others.
    """
    with gradients.micro_step(sync_gradients):
        loss = forward_backward(model, batch, numbers["num_items_in_batch"])
    add_loss(loss, sync_gradients)
    if not sync_gradients:
        return {}
    grad_norm = clip(model)
    update(numbers["update"])
    gradients.drop()
    return {"grad_norm": grad_norm}


def _trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def average_gradients(model: nn.Module, processes: Processes) -> None:
    """Give all processes the mean of their gradients, once for an optimizer step."""
    if processes.row_shards == 1:
        return
    parameters = _trained_of(model)
    used = [parameter.grad is not None for parameter in parameters]
    if not is_in_torch_dispatch_mode():
        # Rows of one process may use an expert that those of another do not. In a trace there are no values to exchange, and all
        # processes trace the same.
        used = processes.most(used)
    parameters = [parameter for parameter, by_any in zip(parameters, used, strict=True) if by_any]
    gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
    for parameter, mean in zip(parameters, processes.mean(gradients), strict=True):
        parameter.grad = mean


class GradientSums:
    """
    The gradients of optimizer steps. Where a step is one micro-step, they live within its program, and parameters have none between
    steps.

    Where it is several (`accumulates`), their sums are kept in `tensors`, a part of the state that programs read and write. They are
    zeros at the start, so that the first micro-step adds to them like every other and is the same program; `earlier` sums go on. Gradients are averaged over `processes`, each of which has rows of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulates: bool,
        earlier: "GradientSums | None" = None,
        processes: Processes = ALONE,
    ):
        self._model, self._processes = model, processes
        self._trained = _trained_of(model)
        earlier_sums = {} if earlier is None else earlier.sums
        #: The sum of each parameter's gradients, of its shape.
        self.sums: dict[nn.Parameter, Tensor] = {
            parameter: earlier_sums[parameter] if parameter in earlier_sums else torch.zeros_like(parameter)
            for parameter in self._trained
            if accumulates
        }
        #: All that is kept, always in the same order.
        self.tensors: list[Tensor] = [*self.sums.values()]
        #: Whether code of the user's has been given what is kept, see [`~GradientSums.show`].
        self.are_shown = False
        # By the micro-steps of this optimizer step that ran in Python, and of the one before it.
        self._used: set[nn.Parameter] = set()
        self._used_before: set[nn.Parameter] = set()
        self._shown_parameters: set[nn.Parameter] = set()

    def are_of(self, model: nn.Module) -> bool:
        """Whether these are the gradients of what a model trains now. Some parameters may have been frozen since."""
        return set(self._trained) == set(_trained_of(model))

    @contextmanager
    def micro_step(self, sync_gradients: bool) -> Iterator[None]:
        """
        Context of a forward and backward pass. After the last one of an optimizer step, parameters that any of its micro-steps has
        used have their gradient.
        """
        before = [total._version for total in self.sums.values()]
        for parameter, total in self.sums.items():
            parameter.grad = total
        yield
        for (parameter, total), version in zip(self.sums.items(), before, strict=True):
            if parameter.grad is None:
                # A hook has taken it away, and with it those of the micro-steps before.
                total.zero_()
                self._used.discard(parameter)
            elif parameter.grad is not total:
                # A hook has put another in its place.
                total.copy_(parameter.grad)
                self._used.add(parameter)
            elif total._version != version:
                # Autograd has added to it in place.
                self._used.add(parameter)
            parameter.grad = total if sync_gradients and parameter in self._used else None
        if not self.sums:
            for parameter in self._trained:
                if parameter.grad is not None:
                    # Memory of its own, as on an eager device. torch_xla has left it a view, and of a gradient that is one number
                    # for all elements (that of `parameter.sum()`), what clipping writes to each would be added up.
                    parameter.grad = parameter.grad.clone()
        if sync_gradients:
            average_gradients(self._model, self._processes)

    def show(self) -> None:
        """Give parameters the gradients that are kept, for code of the user's between two micro-steps."""
        # A micro-step that was run by its handle has noted nothing.
        self._shown_parameters, self.are_shown = self._used or self._used_before, True
        for parameter in self._shown_parameters:
            parameter.grad = self.sums[parameter]

    @torch.no_grad()
    def take_back(self) -> None:
        """Keep what that code has made of them. Trained parameters have none again."""
        for parameter, total in self.sums.items():
            if not parameter.requires_grad:
                # Frozen since: its sum stays, and this step still updates it.
                continue
            if parameter.grad is None:
                if parameter in self._shown_parameters:
                    total.zero_()
            elif parameter.grad is not total:
                total.copy_(parameter.grad)
                self._used.add(parameter)
            parameter.grad = None
        self.are_shown = False

    def drop(self) -> None:
        """Begin another optimizer step."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._used, self._used_before = set(), self._used
        for total in self.sums.values():
            total.zero_()
