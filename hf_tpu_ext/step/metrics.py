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
            self._set(name, self.tensors[name] + value.detach().to(self.tensors[name].dtype))

    def put(self, **values: torch.Tensor) -> None:
        """Replace sums by device scalars, by name."""
        for name, value in values.items():
            self._set(name, value.detach().to(self.tensors[name].dtype))

    def _set(self, name: str, value: torch.Tensor) -> None:
        if self._backend.compiles_functions:
            # What a function that is compiled changes is its arguments.
            self.tensors[name].copy_(value)
        else:
            # On torch_xla what is copied is another graph than what was sent, in the second step.
            self.tensors[name] = value


@dataclass(frozen=True)
class LossWindow:
    """
    What a [`LossLog`] held when it was read: the sum of the losses, the number of optimizer steps, how many losses of micro-steps
    were NaN or infinite, and in which step, from 1, the first was; 0 if none was.
    """

    total: float
    steps: int
    nonfinite: int
    first_nonfinite: int

    @property
    def mean(self) -> float:
        """Mean loss of the steps; 0 if there was none."""
        return self.total / self.steps if self.steps else 0.0


class LossLog:
    """Sums the losses of micro-steps on the device, as upstream's loop does on a device whose losses it can read."""

    def __init__(self, backend: Backend, filters: bool):
        #: Whether a loss that is NaN or infinite is replaced by a mean of those before it (`logging_nan_inf_filter`).
        self.filters = filters
        self._sums = DeviceSums(backend, floats=("loss",), integers=("steps", "nonfinite", "first_nonfinite"))
        #: The sums, to be fetched together with others.
        self.tensors = self._sums.tensors

    def add(self, loss: torch.Tensor, sync_gradients: bool) -> None:
        """Add the loss of a micro-step, of shape `()`. `sync_gradients` says whether it is the last of an optimizer step."""
        sums = self._sums.tensors
        loss = loss.detach().float()
        is_finite, step = torch.isfinite(loss), sums["steps"] + 1
        is_first = ~is_finite & (sums["first_nonfinite"] == 0)
        self._sums.put(first_nonfinite=torch.where(is_first, step, sums["first_nonfinite"]))
        self._sums.add(
            loss=torch.where(is_finite, loss, sums["loss"] / step) if self.filters else loss, nonfinite=~is_finite
        )
        if sync_gradients:
            self._sums.put(steps=step)

    def drop(self) -> None:
        """Start anew."""
        self._sums.reset()

    def read(self, host_sums: dict[str, torch.Tensor]) -> LossWindow:
        """Take `tensors`, as they were fetched to the CPU, and start anew."""
        window = LossWindow(*(host_sums[name].item() for name in ("loss", "steps", "nonfinite", "first_nonfinite")))
        self._sums.reset()
        return window
