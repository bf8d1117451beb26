"""The training loss between two logs, kept on the device."""

from dataclasses import dataclass

import torch

from ..backends.base import Backend
from .metrics import DeviceSums


@dataclass(frozen=True)
class LossWindow:
    """
    What a [`LossLog`] held when it was read: the sum of the finite step losses, numbers of optimizer steps, and which
    step, from 1, was the first with a loss of NaN or infinity; 0 if none was.
    """

    total: float
    steps: int
    finite_steps: int
    first_nonfinite: int

    @property
    def mean(self) -> float:
        """Mean loss of the finite steps; NaN if there was none."""
        return self.total / self.finite_steps if self.finite_steps else float("nan")


class LossLog:
    """
    Sums the loss of optimizer steps on the device, and sets apart the steps whose loss is NaN or infinite.

    Upstream adds every loss to one sum and, with its filter off (as it has to be where reading the loss would stop the
    program), one NaN makes every later logged loss NaN.
    """

    def __init__(self, backend: Backend):
        self._sums = DeviceSums(
            backend, floats=("loss", "micro_loss"), integers=("steps", "finite_steps", "first_nonfinite")
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums, to be fetched together with others."""
        return self._sums.tensors

    def add(self, loss: torch.Tensor, closing: bool, accumulating: bool) -> None:
        """
        Count the loss of a micro-step, of shape `()`: its share of the optimizer step's, whose last micro-step is
        `closing`. `accumulating` is whether there are several.
        """
        sums = self._sums.tensors
        loss = loss.detach().float()
        if accumulating:
            loss = sums["micro_loss"] + loss
            self._sums.put(micro_loss=torch.zeros_like(loss) if closing else loss)
        if not closing:
            return
        finite = torch.isfinite(loss)
        step = sums["steps"] + 1
        is_first = ~finite & (sums["first_nonfinite"] == 0)
        self._sums.add(loss=torch.where(finite, loss, torch.zeros_like(loss)), finite_steps=finite)
        self._sums.put(steps=step, first_nonfinite=torch.where(is_first, step, sums["first_nonfinite"]))

    def drop(self) -> None:
        """Start anew."""
        self._sums.reset()

    def read(self, fetched: dict[str, torch.Tensor]) -> LossWindow:
        """Take `tensors`, as they were fetched to the CPU, and start anew."""
        names = ("loss", "steps", "finite_steps", "first_nonfinite")
        window = LossWindow(*(fetched[name].item() for name in names))
        self._sums.reset()
        return window
