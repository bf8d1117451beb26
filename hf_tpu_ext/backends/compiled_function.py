"""Functions that are compiled once and run many times, and the memory that their programs are given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from transformers.utils import logging

from ..temporarily import temporarily


logger = logging.get_logger(__name__)

#: Why a function does not run by its program.
SYNCS = "a device-to-host sync in the step, whose value may decide what runs next"
DRAWS_ON_HOST = (
    "a step draws random numbers on the host (random, numpy.random or torch); step_replay=True if they do not matter"
)
REPLACES_STATE = "a tensor of the training state is replaced in the middle of a step"

#: What makes steps that differ in a number the same program.
IN_A_BUFFER = " (what changes from step to step belongs into a buffer of the model, which a callback fills)"

# A function that has to be traced anew this often, and does not run by its program in between, is better traced each time.
_MOST_CHANGES = 4


class ShapeAndDtype(NamedTuple):
    """What a program depends on of a tensor that it is given."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def describe_batch(batch: Mapping[Hashable, Any]) -> dict[Hashable, Hashable]:
    """
    What a program depends on of a batch, by its keys: of tensors shape and dtype, of other values all. What is in lists and dictionaries
    has keys such as `images[0]`.
    """
    description = {}
    for key, value in batch.items():
        leaves, _ = tree_flatten_with_path(value, is_leaf=_is_empty)
        for path, leaf in leaves:
            description[f"{key}{keystr(path)}" if path else key] = _describe(leaf)
    return description


def _is_empty(value: Any) -> bool:
    # Otherwise it would leave no trace.
    return isinstance(value, (dict, list, tuple)) and not value


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return ShapeAndDtype(value.shape, value.dtype)
    return (value.shape, value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


class CannotReplay(Exception):
    """What was traced cannot be run again by its handle. Nothing of it has run yet. The message says why, as a clause."""


class StateLost(RuntimeError):
    """A program failed after it was given the buffers of the weights, whose values are gone."""


class Call(NamedTuple):
    """A call of a compiled function: its arguments, and the tensors of `data`."""

    data: Mapping[Hashable, Any]
    tensors: list[torch.Tensor]
    end: Callable[..., Any]
    static_args: dict[str, Any]


class CompiledFunction(ABC):
    """
    A function of a state and of data, which runs as a compiled program: `compiled(data, end, **static_args)`.

    The state, which is declared, is written in place, and its buffers are given to the program. `data` is a dict, whose tensors are
    on the device and differ from call to call; what else is in it, and `static_args`, is part of the program. The function is called as
    `function(data, **static_args)` and returns nested tensors.

    The first calls of a kind and shape are traced: one, or with torch_xla two, whose graphs are compared. Later ones run their program
    by its handle, and no Python of the function. Where the fingerprint has changed, a call is traced anew.

    Args:
        backend ([`~hf_tpu_ext.backends.base.Backend`]):
            Where it runs.
        function (`Callable`):
            What is compiled.
        state (`Callable[[], list[torch.Tensor]]`):
            Lists the tensors that it reads and writes besides those of the fingerprint, always in the same order.
        fingerprint ([`~hf_tpu_ext.step.fingerprint.Fingerprint`]):
            What else it depends on.
        copies ([`RealCopies`]):
            Knows whether tensors may have aliases; `None` where copies always have memory of their own. Calls are made outside of
            this context: see [`~RealCopies.suspend`].
        draws_on_host (`bool`, *optional*, defaults to `False`):
            Whether random numbers that it draws on the host do not matter.
        warn (`Callable[[str], None]`, *optional*):
            Says why calls are traced, given a clause.
    """

    #: Why each call is traced, as a clause, or `None` where calls run by their program.
    why_traced: str | None = None
    #: What has changed that programs depend on, when that was noticed last, as a clause.
    change: str | None = None
    #: Whether the last call ran no Python of the function.
    replays: bool = False
    #: What the program of the last call is for, or `None` where each is traced.
    key: Hashable = None

    def __init__(
        self,
        backend: Any,
        function: Callable[..., Any],
        state: Callable[[], list[torch.Tensor]],
        fingerprint: Any,
        copies: "RealCopies | None",
        draws_on_host: bool = False,
        warn: Callable[[str], None] | None = None,
    ):
        self._backend, self._function, self._list_state = backend, function, state
        self._fingerprint, self._copies, self._draws_on_host, self._warn = fingerprint, copies, draws_on_host, warn
        self._programs: dict[Hashable, Any] = {}
        # How often it was traced anew since it ran by its program.
        self._changes = 0
        # Whether nothing changes between calls, and whether one of them has compared what programs depend on.
        self._is_unchanged = self._is_compared = False
        fingerprint.note()

    def __call__(self, data: Mapping[Hashable, Any], end: Callable[..., Any], **static_args: Hashable) -> Any:
        """
        Call the function, or run its program.

        Whoever watches programs gives `end`, which is called for each that is traced, as `end(execute=execute)`: it calls `execute()`,
        which compiles and runs the program, and counts and times that. `None` says that all operators have run one by one.
        """
        self._backend.flush()
        self.replays, self.key = False, None
        if self.why_traced is None:
            self._follow()
        if self.why_traced is None:
            tensors = [leaf for leaf in tree_leaves(dict(data)) if isinstance(leaf, torch.Tensor)]
            self.key = (*static_args.items(), *describe_batch(data).items())
            try:
                results = self._run_program(self.key, self._state(), Call(data, tensors, end, static_args))
            except CannotReplay as error:
                self.refuse(str(error))
            else:
                if self.replays:
                    self._changes = 0
                return results
        results = self._function(data, **static_args)
        end(execute=None if self._backend.compiles_operators else self._backend.end_step)
        return results

    @abstractmethod
    def _run_program(self, key: Hashable, state: list[torch.Tensor], call: Call) -> Any:
        """Run the program for a `key`, or trace the function for one. Raises [`CannotReplay`] where nothing has run."""

    def _state(self) -> list[torch.Tensor]:
        return [*self._fingerprint.tensors, *self._list_state()]

    def assume_unchanged(self) -> AbstractContextManager[None]:
        """Context of calls between which nothing changes that programs depend on: it is compared at the first of them."""
        return temporarily(self, _is_unchanged=True, _is_compared=False)

    def refuse(self, reason: str) -> None:
        """Trace each call from now on, and say why: `reason` is a clause."""
        if self.why_traced is None and self._warn is not None:
            self._warn(reason)
        self.why_traced = reason
        self._programs.clear()

    def _agree(self, what: str, reason: str | None) -> str | None:
        """What this process has found out, or another one, where they trace and run programs together."""
        processes = self._backend.processes
        reasons = processes.exchange(what, reason) if processes.one_program else [reason]
        return next((reason for reason in reasons if reason is not None), None)

    def _follow(self) -> None:
        """Forget all programs where something has changed that they depend on."""
        if self._is_unchanged and self._is_compared:
            return
        self._is_compared = True
        change = self._agree("the beginning of a step", self._fingerprint.change())
        if change is None:
            return
        self.change = change
        self._changes += 1
        reason = self._agree("what has changed before a step", self._fingerprint.why_not())
        if reason is None and self._changes > _MOST_CHANGES:
            reason = f"{change}, and there were {_MOST_CHANGES} such changes before{IN_A_BUFFER}"
        if reason is not None:
            self.refuse(reason)
            return
        if self._programs:
            # Where that compiles another program, the watch says so.
            logger.info(f"The step is traced again: {change}.")
        self._programs.clear()
        self._fingerprint.note()


def end_unwatched(*args: Any, execute: Callable[[], Any] | None = None) -> Any:
    """What is given for `end` where nobody watches programs."""
    return None if execute is None else execute()


class RealCopies(AbstractContextManager):
    """Context in which copies of device tensors have memory of their own, as on an eager device."""

    #: Whether device tensors came out of a call since this was last set to `False`: one may be an alias of a weight.
    has_aliases: bool

    @abstractmethod
    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Within this context, the other one is left, for code that runs thousands of operators."""


class Programs(ABC):
    """What compiles functions on a device, and knows the memory that their programs are given."""

    #: What a function is compiled to.
    compiled_function: ClassVar[type[CompiledFunction]]

    def __init__(self, backend: Any):
        self._backend = backend

    def compile(self, *args: Any, **kwargs: Any) -> CompiledFunction:
        """Make a [`CompiledFunction`] of its arguments but the backend."""
        return self.compiled_function(self._backend, *args, **kwargs)

    @abstractmethod
    def memory_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """A number for each tensor, on the device or on the host: another number is other memory."""

    # ---- Where a copy of a tensor may share its memory ----

    def find_aliases(self, state: Sequence[torch.Tensor]) -> set[int]:
        """Places of device tensors that share their memory with others, such as those of a `state_dict()` in use."""
        return set()

    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Give all copies of tensors in this process memory of their own, before a program is given the state's."""

    def real_copies(self) -> RealCopies | None:
        """Make a context in which every copy of a tensor gets memory of its own at once. `None` where each does."""
        return None
