"""Sums that stay on the device between two logs."""

from collections.abc import Iterable

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
