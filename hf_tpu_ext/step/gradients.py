"""Gradients between steps."""

from collections.abc import Collection

import torch
from torch import nn


class StepGradients:
    """
    Zeroes the gradients of a model, in place of its `zero_grad`.

    With gradient accumulation (`keep`) gradients are there from the start of a run and are zeroed in place, so that
    the first micro-step adds to them like every other and is the same program. Without it they live inside the one
    program of a step and need no memory between steps.
    """

    def __init__(self, model: nn.Module, keep: bool):
        self._parameters = list(model.parameters())
        self._kept: list[nn.Parameter] = []
        self._received: set[nn.Parameter] = set()
        self._hooks = []
        #: Whether the program of the step under way zeroes them.
        self.in_program = False
        if keep:
            self._kept = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in self._kept:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._received.add))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero those that are kept, whatever `set_to_none` says."""
        if self.in_program:
            return
        kept = set(self._kept)
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none and parameter not in kept:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()
        self._received.clear()

    @property
    def unused(self) -> Collection[nn.Parameter]:
        """Parameters that no micro-step has used since gradients were zeroed. Without this they would have no gradient."""
        return [parameter for parameter in self._kept if parameter not in self._received]

    def close(self) -> None:
        """Follow the gradients no longer."""
        for hook in self._hooks:
            hook.remove()
