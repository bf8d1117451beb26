"""AdamW whose update may be a part of a compiled step."""

from inspect import unwrap
from typing import Any

import torch

from .optimizer import update_adamw


# What a group says of how its update is computed.
_HOW = ("fused", "foreach", "capturable", "differentiable")


class ProgramAdamW(torch.optim.AdamW):
    """
    PyTorch's AdamW, fused, with the same state. Its `step` does nothing where the program of the step has updated the weights.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        #: Whether the program of the step under way has updated the weights.
        self.in_program = False

    def step(self, closure=None):
        if self.in_program:
            self.in_program = False
            return None
        # As it was written: PyTorch wraps the `step` of each class to call the hooks, which are to be called once.
        with torch.no_grad():
            return unwrap(torch.optim.AdamW.step)(self, closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any AdamW with the same parameters. How it was run there says nothing of how it is run here."""
        groups = [
            {**saved, **{name: own[name] for name in _HOW}}
            for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=False)
        ]
        # Other numbers of groups are for PyTorch to refuse.
        groups += state_dict["param_groups"][len(groups) :]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def create_state(self) -> None:
        """Make the moments of the parameters that are trained, where they are not there yet, all on their device."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state and state["step"].device != parameter.device:
                    state["step"] = state["step"].to(parameter.device)
                if parameter.requires_grad and not state:
                    self.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format).detach(),
                    }

    @staticmethod
    def update(
        group: dict[str, Any],
        rate: torch.Tensor,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        states: list[dict[str, torch.Tensor]],
    ) -> None:
        """Update parameters of a group, in place, and their states."""
        # PyTorch's own form that a tracer may follow divides 0 by 0 where the rate is 0.
        beta1, beta2 = group["betas"]
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            step = state["step"].add_(1)
            numbers = 1 - rate * group["weight_decay"], rate / (1 - beta1**step), (1 - beta2**step).sqrt()
            update_adamw(group, parameter, gradient, state, numbers)
