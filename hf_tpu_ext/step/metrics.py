"""Metrics and the training loss between two logs, summed on the device."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..backends.base import Backend


class DeviceSums:
    """
    Named running sums on the device, float32 and int64, read in one transfer.

    Sums start as data, not as constants, so the first step that adds to them is the same program as every later one.
    Counts are kept as integers: a float32 sum would lose tokens beyond 2**24.
    """

    def __init__(self, backend: Backend, floats: Iterable[str], integers: Iterable[str]):
        self._backend = backend
        self._zeros = {name: torch.zeros((), dtype=torch.float32) for name in floats}
        self._zeros |= {name: torch.zeros((), dtype=torch.int64) for name in integers}
        self.tensors: dict[str, torch.Tensor] = {}
        self.reset()

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Set sums, by default all, back to 0."""
        names = self._zeros if names is None else names
        self.tensors.update(self._backend.send({name: self._zeros[name].clone() for name in names}))

    def extend(self, names: Iterable[str]) -> None:
        """Keep further float32 sums."""
        names = list(names)
        self._zeros |= {name: torch.zeros((), dtype=torch.float32) for name in names}
        self.reset(names)

    def add(self, **values: torch.Tensor) -> None:
        """Add device scalars to sums, by name. Autograd does not follow it."""
        for name, value in values.items():
            self.tensors[name] = self.tensors[name] + value.detach().to(self.tensors[name].dtype)

    def put(self, **values: torch.Tensor) -> None:
        """Replace sums by device scalars, by name."""
        self.tensors.update({name: value.detach().to(self.tensors[name].dtype) for name, value in values.items()})


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
