"""What a runtime tells about the programs that it compiles and runs: counts, and for messages what is in them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Counters:
    """What the accelerator's runtime has done since the process started."""

    #: Programs compiled.
    compiles: int = 0
    #: Seconds spent in compiling them, and in loading others from the compile cache.
    compile_seconds: float = 0.0
    #: Programs run on the device.
    executions: int = 0
    #: Transfers from the device to the host.
    reads: int = 0
    #: Operators that ran on the host because the device has none of them.
    fallbacks: int = 0
    #: Executions of a program by its handle, without its being traced.
    replays: int = 0
    #: Programs loaded from the compile cache.
    loads: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(*(mine - less for mine, less in zip(astuple(self), astuple(earlier), strict=True)))


# Where steps are traced, torch_xla sends a Python number to the device as data, except for these, which it folds into the program
# as constants. So a number that moves to one of them, or away from it, is another program.
_FOLDED = (0, 1, -1)
#: For messages.
FOLDED_NUMBERS = "0, 1 and -1"


def describe_number(value: float) -> str:
    """Say which values of a Python number are different programs: those that are folded, and one for all others."""
    return f"{value:g}" if value in _FOLDED else "neither 0, 1 nor -1"


@dataclass(frozen=True)
class SourceLine:
    """A line of Python code. `function` is what it is in; empty where that is not known."""

    file: str
    line: int
    function: str = ""


@dataclass(frozen=True)
class Operation:
    """An operation of a program. Operations are the same whatever their operator and line, which are not recorded at every step."""

    #: What it does, e.g. `"constant"`.
    name: str
    #: Dtype and shape of its result, e.g. `"f32[4,64]"`.
    shape: str
    #: What else makes it what it is: the number of a constant, the bounds of a slice.
    details: str
    #: The PyTorch operator that it is a part of, e.g. `"aten::mul"`.
    operator: str = field(compare=False)
    #: The line of Python that recorded it, where it is known.
    place: SourceLine | None = field(default=None, compare=False)
    #: A hash of the operation and of all that it is computed from, whichever parameters of the program these are.
    structure: int = field(default=0, compare=False)
    #: As `structure`, with the same in the place of each number and of what is computed from numbers alone, which is 0.
    form: int = field(default=0, compare=False)
    #: Numbers that it takes which are parameters of the program, by their names in there.
    numbers: tuple[str, ...] = field(default=(), compare=False)


#: Lists the operations of a recorded program, in their order.
Listing = Callable[[], list[Operation]]


class Insight:
    """What is known about compiling and about reads of the device. Here nothing is compiled."""

    def compile_sites(self) -> list[list[SourceLine]]:
        """The calls that led to each compile since the last time this was asked, innermost first."""
        return []

    def note_lines(self, on: bool) -> None:
        """Whether to note, for each operation that is recorded from now on, which line of Python did it."""

    def operations(self, results: Sequence[torch.Tensor]) -> Listing | None:
        """
        The program that was recorded and not run yet, for those of `results` that it computes, in its order. It is noted now, and
        read when it is called, which most are not. `None` where nothing was recorded.
        """
        return None

    def operators_on_host(self) -> dict[str, int]:
        """How often each operator ran on the host so far because the device has none of them."""
        return {}

    @contextmanager
    def own_reads(self) -> Iterator[None]:
        """Context whose reads of the device are meant to be."""
        yield

    def stray_reads(self) -> int:
        """Transfers from the device so far that were in no context of `own_reads`."""
        return 0

    def traffic(self) -> tuple[int, ...]:
        """Counts that rise whenever an operator reads the device, and also when it does other things. Cheap."""
        return ()

    def has_read(self, before: tuple[int, ...], result: Any) -> bool:
        """Whether an operator that returned `result` has read the device; `before` is `traffic` before it."""
        return False
