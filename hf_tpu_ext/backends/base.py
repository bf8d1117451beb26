"""The seam between the trainers and an accelerator: one small interface, one file per accelerator."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..hardware.topologies import Chip
from .compile_cache import CacheUse, cache_root
from .counters import Counters
from .insight import Insight
from .program import RealCopies, Recording


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
    #: What the runtime tells about compiles and reads.
    insight: Insight = Insight()

    def __init__(self, reason: str):
        self.reason = reason

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        # There is one in a process. What a run puts on the modules of a model may hold it.
        return self

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
    def chip(self) -> Chip | None:
        """What is known of the kind of chip, or `None` where nothing is."""
        return None

    @property
    def memory_per_chip(self) -> int | None:
        """Bytes that a program can use on one chip, or `None` where that is not known."""
        return None if self.chip is None else self.chip.memory_bytes

    def peak_memory(self) -> int | None:
        """
        The most bytes that were in use at once so far, or `None` where the runtime does not say.

        On the device, or where that is the host, of the process.
        """
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

    def prepare_host(self) -> list[str]:
        """
        Set up the machine, before the runtime starts.

        Returns:
            `list[str]`: One line for each thing that was done or that a person should do.
        """
        return []

    def use_compile_cache(self, setting: str) -> list[str]:
        """
        Keep compiled programs on disk, for other processes. Before anything is compiled.

        Args:
            setting (`str`):
                As `compile_cache_dir` in [`~hf_tpu_ext.trainers.ExtensionArguments`].

        Returns:
            `list[str]`: One line for each thing that a person should know.
        """
        directory, chosen = cache_root(setting)
        if directory is None or not chosen:
            return []
        return [f"compile_cache_dir={directory} has no effect on {self.name}: nothing is compiled"]

    def cache_use(self) -> CacheUse | None:
        """What this process has had of its compile cache so far, or `None` where there is none."""
        return None

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

    #: Whether what is traced now is in such a part, so that shapes are those of one chip.
    chips_apart: bool = False

    @contextmanager
    def on_each_chip(self, apart: bool = True) -> Iterator[None]:
        """
        Within this context, what is traced is in such a part.

        Args:
            apart (`bool`, *optional*, defaults to `True`):
                `False` for a context without effect.
        """
        before, self.chips_apart = self.chips_apart, self.chips_apart or apart
        try:
            yield
        finally:
            self.chips_apart = before

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

    def draw_seeds(self, count: int) -> torch.Tensor:
        """
        Draw seeds with the device's random number generator.

        Args:
            count (`int`):
                How many.

        Returns:
            `torch.Tensor` of shape `(count, 2)`, int32: The seeds, the same on all chips, each with the number of the chip
            where each chip runs by itself, and with 0 elsewhere.
        """
        seeds = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=self.device)
        chip = torch.zeros((1,), dtype=torch.int32, device=self.device)
        if self.chips_apart:
            chips = torch.arange(self.num_chips, dtype=torch.int32, device=self.device)
            seeds, chip = self.enter_chip(seeds), self.enter_chip(chips, by_rows=True)
        return torch.stack([seeds, chip.expand(count)], 1)

    def scan(
        self,
        turn: Callable,
        carry: tuple,
        tensors: tuple[torch.Tensor, ...],
        reverse: bool = False,
    ) -> tuple[tuple, tuple]:
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
            reverse (`bool`, *optional*, defaults to `False`):
                Whether to begin with the last entry. The results are in the order of the entries all the same.

        Returns:
            `tuple`: What the last turn carried on, and the results of all turns, stacked.
        """
        results = []
        order = slice(None, None, -1 if reverse else 1)
        with torch.no_grad():
            for entries in list(zip(*tensors, strict=True))[order]:
                carry, result = turn(carry, entries)
                results.append(result)
            results = results[order]
            return carry, tuple(torch.stack(result) for result in zip(*results, strict=True))

    def take_rows(self, tensor: torch.Tensor, start: torch.Tensor, size: int) -> torch.Tensor:
        """
        Take successive rows, from where a tensor on the device says.

        Autograd does not follow it.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`):
                Where to take them from.
            start (`torch.Tensor` of shape `()`):
                The first one.
            size (`int`):
                How many.

        Returns:
            `torch.Tensor` of shape `(size, ...)`: The rows.
        """
        return tensor.detach()[start : start + size]

    def put_rows(self, tensor: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """
        Replace successive rows, from where a tensor on the device says.

        Autograd does not follow it.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`):
                Where to put them. It is not to be used afterwards.
            start (`torch.Tensor` of shape `()`):
                The first one.
            rows (`torch.Tensor` of shape `(size, ...)`):
                The new rows.

        Returns:
            `torch.Tensor` of shape `(rows, ...)`: The tensor with the new rows.
        """
        tensor.detach()[start : start + rows.shape[0]] = rows
        return tensor

    def keep_in_turn(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Keep the conversion of a slice in the turn of the loop that takes it. The compiler for TPU would convert the whole
        tensor before the loop, and have it in memory in both dtypes.

        Autograd does not follow it.

        Args:
            tensor (`torch.Tensor`):
                Rows from [`~Backend.take_rows`], or an entry of [`~Backend.scan`].

        Returns:
            `torch.Tensor`: The same.
        """
        return tensor

    def end_step(self) -> None:  # noqa: B027
        """Close the program recorded so far and start it, without waiting for it."""

    def flush(self) -> None:  # noqa: B027
        """Start what was recorded so far, if there is anything."""

    def record(self, state: Sequence[torch.Tensor]) -> Recording:
        """
        Begin to record a program. What was traced before is run first.

        Args:
            state (`Sequence[torch.Tensor]`):
                Tensors that the program reads and may change in place.

        Returns:
            [`Recording`]: The recording.

        Raises:
            `CannotReplay`: The state does not allow it.
        """
        raise NotImplementedError

    def memory_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """
        Tell the memory of tensors apart: another number is other memory.

        Args:
            tensors (`Sequence[torch.Tensor]`):
                Tensors on the device or on the host.

        Returns:
            `list[int]`: A number for each.
        """
        return [tensor.data_ptr() for tensor in tensors]

    def aliased(self, state: Sequence[torch.Tensor]) -> set[int]:
        """
        Find tensors that share their memory with others, such as those of a `state_dict()` that somebody keeps.

        Args:
            state (`Sequence[torch.Tensor]`):
                Tensors on the device.

        Returns:
            `set[int]`: Places of those that do.
        """
        raise NotImplementedError

    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:
        """
        Give all copies of tensors that were made in this process memory of their own, before a program is given the state's.

        Args:
            state (`Sequence[torch.Tensor]`):
                Tensors on the device.
        """
        raise NotImplementedError

    def real_copies(self) -> RealCopies:
        """
        Make a context in which every copy of a tensor gets memory of its own at once.

        Returns:
            [`RealCopies`]: The context, which can be left for a while.
        """
        raise NotImplementedError

    def keeps_program(self, compiles: int) -> bool:
        """
        Whether a compiled program is still there.

        Args:
            compiles (`int`):
                [`~Backend.compiles`] when it was run last.
        """
        raise NotImplementedError

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

    def fetch(self, data: Any, on_finished: Callable[[], None] | None = None) -> Any:
        """
        Move device tensors to the host, all in one transfer.

        Args:
            data (`Any`):
                A tensor, or a nested structure of them. Tensors that share memory still do afterwards.
            on_finished (`Callable[[], None]`, *optional*):
                Called between the wait for the device and the transfer, where these are two things.

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

    def separate(self, tensors: list[torch.Tensor]) -> None:  # noqa: B027
        """
        Keep the compiler from seeing that what is computed from tensors was computed before.

        Args:
            tensors (`list[torch.Tensor]`):
                Tensors on the device. What uses them from now on waits until all of them are there.
        """

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
