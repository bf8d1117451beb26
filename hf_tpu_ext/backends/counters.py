"""What a runtime has done, in numbers."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counters:
    """
    What the accelerator's runtime has done since the process started.

    Args:
        compiles (`int`):
            Programs compiled.
        compile_seconds (`float`):
            Seconds spent in compiling them, and in loading others from the compile cache.
        executions (`int`):
            Programs run on the device.
        reads (`int`):
            Transfers from the device to the host.
        fallbacks (`int`):
            Operators that ran on the host because the device has none of them.
        replays (`int`):
            Executions of a program by its handle, without its being traced.
        loads (`int`):
            Programs loaded from the compile cache.
    """

    compiles: int = 0
    compile_seconds: float = 0.0
    executions: int = 0
    reads: int = 0
    fallbacks: int = 0
    replays: int = 0
    loads: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(*(mine - less for mine, less in zip(astuple(self), astuple(earlier), strict=True)))
