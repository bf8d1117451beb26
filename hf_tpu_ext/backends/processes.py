"""The processes that train one model, as a run asks about them. Here: one process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UserError


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor on the host, to be hashed."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


class HostsDisagree(UserError):
    """Hosts of a slice that were to do the same do not, or cannot. Raised on all of them."""


class Processes:
    """
    The processes that train one model, all with the same code in the same order: one on each host of a slice, where they run one
    program on the chips of all ([`SliceHosts`]), or one for each device, with rows of its own ([`DeviceProcesses`]).

    This is one process, which has nobody to ask.
    """

    #: How many there are, and which of them this is. The first writes what is written once.
    count = 1
    index = 0
    #: Hosts that they are on, and what messages call each of them.
    hosts = 1
    word = "process"
    #: Whether several run one program together, whose batches have the rows of all: its chips share them out by themselves.
    one_program = False
    #: Whether each has rows of its own, and gradients are averaged.
    own_rows = False
    #: In how many parts they have the rows of a batch, and which of these this process has.
    row_shards = 1
    row_shard = 0
    #: Chips of each host, by their number in the mesh.
    chips: Sequence[Sequence[int]] = ()
    #: Checksum of all that this process has sent to its chips, where there are others to compare it with.
    checksum = 0
    _stop_reason: str | None = None

    # ---- Values on the host ----

    def exchange(self, what: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        """
        Give all processes the value of each, in the order of their indices. All have to be there; `what` says where that is,
        for messages. Hosts of a slice exchange JSON, and raise [`HostsDisagree`] where another is elsewhere, or does not come.

        A process that cannot come there gives its `error`, for which none goes on: it raises that, and others the same or one that
        names it.
        """
        if error is not None:
            raise error
        return [value]

    def of_first(self, what: str, value: Any = None) -> Any:
        """Give all processes the value of the first, as [`~Processes.exchange`] does."""
        return self.exchange(what, value)[0]

    def by_first(self, what: str, function: Callable[[], Any]) -> Any:
        """What the first gets from a function, for all. Its `ValueError` or `OSError` is raised by all."""
        value = error = None
        if self.index == 0:
            try:
                value = function()
            except (ValueError, OSError) as raised:
                error = raised
        return self.exchange(what, value, error)[0]

    def raise_together(self, what: str, error: Exception | None) -> None:
        """Raise the error of this process, or one that names what happened in another. Without any, nothing happens."""
        self.exchange(what, error=error)

    def note_sent(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors of the host that are sent to the chips of this process to the checksum."""

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context of work on the chips of all, which all end before any goes on."""
        yield

    def take_from_first(self, model: nn.Module) -> None:
        """Give all the weights of the first, before the model is placed. An adapter is random where it was made."""

    # ---- What each makes of its own rows: without such, what one makes is of all ----

    def gather(self, tensor: Tensor) -> Tensor:
        """
        The tensors of all on the device, one after the other along their first dimension. Numbers (of no dimension) make a vector.
        Autograd does not follow.
        """
        return tensor

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means over all, of tensors on the device that have the same shapes on each. Autograd does not follow."""
        return list(tensors)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The greatest of each of a few numbers on the host."""
        return list(numbers)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each of a few numbers on the host."""
        return list(numbers)

    # ---- Stopping after the same step: one of several that is told to stop has to ask the others first ----

    def begin_listening(self) -> None:
        """Forget earlier requests to stop."""
        self._stop_reason = None

    def request_stop(self, reason: str) -> None:
        """Ask all to stop. It may be called from a signal handler."""
        self._stop_reason = self._stop_reason or reason

    def pass_place(self) -> str | None:
        """
        Ask at a place where this process can stop, which all others come to as well. Returns why all stop here, if one was asked to.
        """
        return next(filter(None, self.exchange("a stop", self._stop_reason)), None)


#: Where nothing has started others.
ALONE = Processes()
