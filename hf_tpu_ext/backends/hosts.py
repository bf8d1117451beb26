"""The hosts of a slice, one process on each, as a run asks about them. Here: one host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import UserError


class HostsDisagree(UserError):
    """Hosts of a slice that were to do the same do not, or cannot. Raised on all of them."""


class Hosts:
    """
    The hosts that run one program together, all with the same code in the same order. Values that they exchange are JSON.

    This is one host, which has nobody to ask.
    """

    #: How many there are, and which of them this is. The first writes what is written once.
    count = 1
    index = 0
    #: Chips of each host, by their number in the mesh.
    chips: Sequence[Sequence[int]] = ()
    #: Checksum of all that this process has sent to its chips, where there are others to compare it with.
    sent = 0

    def exchange(self, what: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        """
        Give every host the value of each, in the order of their indices. All have to be there; `what` says where that is,
        for messages. Raises [`HostsDisagree`] where another host is elsewhere, or does not come.

        A host that cannot come there gives its `error`, wherever the others wait. It is raised, and what the others raise
        names it.
        """
        if error is not None:
            raise error
        return [value]

    def of_first(self, what: str, value: Any = None) -> Any:
        """Give every host the value of the first, as [`~Hosts.exchange`] does."""
        return self.exchange(what, value)[0]

    def raise_together(self, what: str, error: Exception | None) -> None:
        """Raise the error of this host, or one that names what happened on another. Without any, nothing happens."""
        self.exchange(what, error=error)

    def note_sent(self, data: Any) -> None:
        """Add what is sent to the chips of this host to the checksum."""

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Context of work on the chips of all hosts, which all end before any goes on."""
        yield

    # ---- Stopping after the same step ----

    #: Whether a host that is told to stop has to ask the others first.
    agree_on_stops = False

    def begin_listening(self) -> None:
        """Forget earlier requests to stop."""

    def request_stop(self, reason: str) -> None:
        """Ask all hosts to stop. It may be called from a signal handler."""

    def reached(self) -> str | None:
        """
        Note that this host is at a place where it can stop, which it passes as often as all others. Returns why to stop
        here, if it is here that all do.
        """
        return None
