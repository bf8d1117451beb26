"""AdamW whose step is one program for the whole run, and state that exists before the first step."""

from collections.abc import Callable
from typing import Any

import torch

from ..backends.base import Backend


class LazyAdamW(torch.optim.AdamW):
    """
    [`torch.optim.AdamW`] for lazily compiled devices.

    The update and the state dict are those of [`torch.optim.AdamW`] (decoupled weight decay,
    https://huggingface.co/papers/1711.05101), so checkpoints move between the two. What differs is how the numbers that
    change at each step reach the device: the learning rate, the weight decay factor and the two bias corrections travel
    as one small data tensor. As Python numbers they would be constants of the program whenever they equal 0 or 1: at the
    first step of a warm-up, at the end of a decay to 0, and once `1 - beta2**step` rounds to 1.

    Args:
        params (`Iterable`):
            Parameters or parameter groups.
        backend ([`Backend`]):
            Where the parameters are.
        **kwargs:
            `lr`, `betas`, `eps` and `weight_decay` of [`torch.optim.AdamW`].
    """

    def __init__(self, params, backend: Backend, **kwargs):
        super().__init__(params, **kwargs)
        self._backend = backend

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the moments and step counters that are missing, so that the first step is like every other."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        # On the CPU, as `torch.optim.AdamW` keeps it: counting there costs no device work.
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Load a state dict of this class or of [`torch.optim.AdamW`].

        Args:
            state_dict (`dict[str, Any]`):
                What `state_dict` returned.
        """
        # A checkpoint of the fused AdamW says so in its groups, and PyTorch then puts every step counter on the device,
        # where counting would be one read per parameter and step.
        groups = [{**group, "fused": None, "capturable": False} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> torch.Tensor | None:
        """
        Update every parameter that has a gradient.

        Args:
            closure (`Callable`, *optional*):
                Recomputes the loss.

        Returns:
            `torch.Tensor` or `None`: What `closure` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.create_state()
        updates = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self.state[parameter]["step"] += 1
                updates.append((group, parameter, self.state[parameter]["step"].item()))
        # Parameters that have taken equally many steps share a row: usually one row per group.
        rows: dict[tuple[int, float], int] = {}
        values = []
        for group, _, step in updates:
            if (id(group), step) not in rows:
                rows[id(group), step] = len(values)
                beta1, beta2 = group["betas"]
                values.append(
                    (
                        1 - group["lr"] * group["weight_decay"],
                        group["lr"] / (1 - beta1**step),
                        (1 - beta2**step) ** 0.5,
                    )
                )
        if not updates:
            return loss
        coefficients = [row.unbind() for row in self._backend.send(torch.tensor(values, dtype=torch.float32)).unbind()]
        for group, parameter, step in updates:
            decay, step_size, correction2_sqrt = coefficients[rows[id(group), step]]
            beta1, beta2 = group["betas"]
            state, grad = self.state[parameter], parameter.grad
            state["exp_avg"].lerp_(grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (state["exp_avg_sq"].sqrt() / correction2_sqrt).add_(group["eps"])
            update = state["exp_avg"] / denominator * step_size
            parameter.copy_((parameter * decay - update).to(parameter.dtype))
        return loss


def create_gradients(model: torch.nn.Module) -> None:
    """
    Give every trainable parameter a gradient of zeros, so that the first micro-step adds to it like every other.

    Args:
        model ([`~torch.nn.Module`]):
            Model on its device.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
