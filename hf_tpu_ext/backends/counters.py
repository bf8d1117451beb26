"""What a runtime has done, in numbers."""

from dataclasses import astuple, dataclass


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
