"""A program that is recorded once and run many times."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch


class CannotReplay(Exception):
    """What was recorded cannot be run again. Nothing of it has run yet. The message says why, as half a sentence."""


class Program(ABC):
    """A compiled program, and where its inputs come from."""

    @abstractmethod
    def run(
        self, state: Sequence[torch.Tensor], data: Sequence[torch.Tensor], aliased: Collection[int] = ()
    ) -> list[torch.Tensor]:
        """
        Run it, without waiting for it. The tensors of `state` are those that it was recorded with, or others in their
        place; afterwards they have their new values. `data` has new values for the data that it was recorded with, in
        the same order, and `aliased` the places in the state of tensors that share their memory with others, which are
        to have the new values, too. Returned are the results that were named besides the state, in the same order.
        """

    @abstractmethod
    def difference(self, other: "Program") -> str | None:
        """How another recording of the same step differs, as half a sentence; `None` if it does not matter."""


class Recording(ABC):
    """What is traced from now on, to be compiled once and run many times."""

    @abstractmethod
    def add_data(self, tensors: Sequence[torch.Tensor]) -> None:
        """Name device tensors that have another value at each run. The trace has not used them yet."""

    @abstractmethod
    def add_results(self, tensors: Sequence[torch.Tensor]) -> None:
        """Name device tensors that the trace has made besides the state. Each run makes others."""

    @abstractmethod
    def finish(self, state: Sequence[torch.Tensor], aliased: Collection[int] = ()) -> Program:
        """
        Compile what was traced, unless it is compiled already, and run it once. Returns it for further runs.

        The state is as the trace left it: the same tensors, changed in place, or others in their place. Raises `CannotReplay` if the
        program depends on more than the state and the data, or does more than to change the state.
        """


class RealCopies(AbstractContextManager):
    """Context in which copies of device tensors have memory of their own, as on an eager device."""

    #: Whether device tensors came out of a call since this was last set to `False`: one may be an alias of a weight.
    seen: bool

    @abstractmethod
    def suspend(self) -> None:
        """Leave the context for a while, for code that runs thousands of operators."""

    @abstractmethod
    def resume(self) -> None:
        """Enter it again, if it was left for a while."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within this context, the other one is left."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()


class Programs(ABC):
    """What records programs on a device whose steps are traced, and knows the memory that they are given."""

    @abstractmethod
    def record(self, state: Sequence[torch.Tensor]) -> Recording:
        """
        Begin to record a program that reads the tensors of a state and may change them in place. What was traced
        before is run first. Raises `CannotReplay` if the state does not allow it.
        """

    @abstractmethod
    def keeps(self, compiles: int) -> bool:
        """Whether a compiled program is still there; `compiles` is [`Backend.compiles`] when it was run last."""

    @abstractmethod
    def memory_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """A number for each tensor, on the device or on the host: another number is other memory."""

    @abstractmethod
    def aliased(self, state: Sequence[torch.Tensor]) -> set[int]:
        """Places of device tensors that share their memory with others, such as those of a `state_dict()` in use."""

    @abstractmethod
    def without_base(self, tensor: torch.Tensor) -> torch.Tensor:
        """A traced tensor that is not a view, and does not hold on to what it is a view of. Others are returned as they are."""

    @abstractmethod
    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:
        """Give all copies of tensors in this process memory of their own, before a program is given the state's."""

    @abstractmethod
    def real_copies(self) -> RealCopies:
        """Make a context in which every copy of a tensor gets memory of its own at once."""
