"""The seam between the trainers and an accelerator: one small interface, one file per accelerator."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Counters:
    """
    What the accelerator's runtime has done since the process started.

    Args:
        compiles (`int`):
            Programs compiled.
        compile_seconds (`float`):
            Seconds spent in compiling them.
        executions (`int`):
            Programs run on the device.
        reads (`int`):
            Transfers from the device to the host.
        fallbacks (`int`):
            Operators that ran on the host because the device has none of them.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    executions: int = 0
    reads: int = 0
    fallbacks: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.compiles - earlier.compiles,
            self.compile_seconds - earlier.compile_seconds,
            self.executions - earlier.executions,
            self.reads - earlier.reads,
            self.fallbacks - earlier.fallbacks,
        )


class Backend(ABC):
    """
    One accelerator, and how a training step is run on it.

    The defaults are what upstream does on an eager device, so a backend states only where it differs.

    Args:
        reason (`str`):
            Why this backend was chosen, for the line that is printed at start.
    """

    name: str
    #: Whether operators are recorded and run as one compiled program at the end of a step. Where `True`, the trainers
    #: keep every batch in a declared shape and read nothing from the device between two logs.
    lazy: bool = False

    def __init__(self, reason: str):
        self.reason = reason

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that the model and the batches are placed on. Asking for it may start the runtime."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The device's name for people, e.g. `"TPU v5 lite"`."""

    @property
    def num_chips(self) -> int:
        """Chips that this process drives."""
        return 1

    @property
    def memory_per_chip(self) -> int | None:
        """Bytes that one chip holds, or `None` where the runtime does not say."""
        return None

    def use_chips(self, num_chips: int | None, setting: str) -> None:  # noqa: B027
        """
        Say how many chips to drive, before the runtime starts.

        Args:
            num_chips (`int`, *optional*):
                How many; all by default.
            setting (`str`):
                Name of the setting that says so, for messages.

        Raises:
            `ValueError`: This machine does not have them, or the runtime already drives another number.
        """

    # ---- Mesh: without effect on one device ----

    def use_mesh(self, mesh: dict[str, int]) -> None:  # noqa: B027
        """
        Arrange the chips.

        Args:
            mesh (`dict[str, int]`):
                Size of each axis, outermost first. Their product is `num_chips`.
        """

    def shard(self, tensor: torch.Tensor, spec: tuple) -> None:  # noqa: B027
        """
        Split a tensor over the mesh, in place.

        Args:
            tensor (`torch.Tensor`):
                Tensor on the device.
            spec (`tuple`):
                For each dimension the name of a mesh axis, a tuple of them, or `None`. All `None` puts the whole tensor
                on every chip.
        """

    def constrain_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Keep an activation, and its gradient, split by its first dimension over all chips.

        Args:
            tensor (`torch.Tensor`):
                Activation whose first dimension is the rows of the batch. It is left alone if they do not divide by the
                chips.

        Returns:
            `torch.Tensor`: The same values.
        """
        return tensor

    # ---- A part of a program that each chip runs by itself, on its own rows. Only where `num_chips` is above 1 ----

    def enter_chip(self, tensor: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
        """
        Take a tensor into the part of a program that each chip runs by itself.

        There nothing is exchanged between chips, unless it leaves through [`~Backend.leave_chip`]. Every tensor that the
        part uses enters this way, without its autograd history.

        Args:
            tensor (`torch.Tensor`):
                Tensor on the device: whole on every chip, or with `by_rows` split by its first dimension.
            by_rows (`bool`, *optional*, defaults to `False`):
                Whether the chip sees its own rows only.

        Returns:
            `torch.Tensor`: What one chip holds of it.
        """
        raise NotImplementedError

    def leave_chip(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Take a tensor out of the part of a program that each chip runs by itself.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`):
                What one chip holds.

        Returns:
            `torch.Tensor` of shape `(chips * rows, ...)`: Those of all chips one after the other, each still on its chip.
        """
        raise NotImplementedError

    # ---- Steps ----

    def scan(self, turn: Callable, carry: tuple, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple, tuple]:
        """
        Run a function over the first dimension of tensors, one entry after the other.

        Autograd does not follow it; inside a turn gradients can be computed.

        Args:
            turn (`Callable`):
                Called as `turn(carry, entries)` with tuples of tensors. Returns what is carried on, of the same shapes and
                dtypes, and the turn's results.
            carry (`tuple[torch.Tensor, ...]`):
                What the first turn gets.
            tensors (`tuple[torch.Tensor, ...]` of shapes `(turns, ...)`):
                What to go through.

        Returns:
            `tuple`: What the last turn carried on, and the results of all turns, stacked.
        """
        results = []
        with torch.no_grad():
            for entries in zip(*tensors, strict=True):
                carry, result = turn(carry, entries)
                results.append(result)
            return carry, tuple(torch.stack(result) for result in zip(*results, strict=True))

    def end_step(self) -> None:  # noqa: B027
        """Close the program recorded so far and start it, without waiting for it."""

    def wait(self) -> None:  # noqa: B027
        """Close the program recorded so far, and return when the device has finished all of them."""

    def send(self, data: Any) -> Any:
        """
        Move host tensors to the device, as data that is never folded into a program.

        Args:
            data (`Any`):
                A CPU tensor, or a nested structure of them.

        Returns:
            `Any`: The same structure on the device.
        """
        if isinstance(data, torch.Tensor):
            return data.to(self.device)
        if isinstance(data, Mapping):
            return {key: self.send(value) for key, value in data.items()}
        if isinstance(data, (list, tuple)):
            return type(data)(self.send(value) for value in data)
        return data

    def send_rows(self, data: Any, num_rows: int) -> Any:
        """
        Move a batch to the device; each chip gets its own rows only.

        Args:
            data (`Any`):
                A CPU tensor, or a nested structure of them.
            num_rows (`int`):
                Rows of the batch. Tensors with another first dimension go to every chip.

        Returns:
            `Any`: The same structure on the device.
        """
        return self.send(data)

    def fetch(self, data: Any) -> Any:
        """
        Move device tensors to the host, all in one transfer.

        Args:
            data (`Any`):
                A tensor, or a nested structure of them. Tensors that share memory still do afterwards.

        Returns:
            `Any`: The same structure on the CPU.
        """
        if isinstance(data, torch.Tensor):
            return data.detach().cpu()
        if isinstance(data, Mapping):
            return type(data)((key, self.fetch(value)) for key, value in data.items())
        if isinstance(data, (list, tuple)):
            return type(data)(self.fetch(value) for value in data)
        return data

    def place(self, model: nn.Module) -> nn.Module:
        """
        Move a model to the device; tied weights stay tied.

        Args:
            model ([`~torch.nn.Module`]):
                Model on any device. It is changed in place.

        Returns:
            [`~torch.nn.Module`]: The same model.
        """
        return model.to(self.device)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager:
        """
        Context in which the forward pass computes in `dtype`, with the weights kept as they are.

        Args:
            dtype (`torch.dtype`, *optional*):
                Compute dtype; `None` leaves every operator in the dtype of its inputs.
        """
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def checkpoint_function(self) -> Callable | None:
        """The activation checkpoint function that saves memory here, or `None` where PyTorch's own does."""
        return None

    def compiles(self) -> int:
        """Programs compiled so far. Cheap enough to be asked at every step."""
        return 0

    def counters(self) -> Counters:
        """What the runtime has compiled, run and transferred so far."""
        return Counters()

    def rng_state(self) -> int | None:
        """State of the device's random number generator, where it is one integer of its own."""
        return None

    def set_rng_state(self, state: int) -> None:  # noqa: B027
        """Restore what [`~Backend.rng_state`] returned."""
