"""Which line of Python reads the device."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode

from ..backends.insight import Insight
from .source_lines import current_frames, describe_line, library_line, own_line, package_of


_WRITTEN = {
    "__bool__": "if tensor",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "an index",
    "__repr__": "print(tensor)",
    "__format__": "an f-string",
    "__array__": "a NumPy array",
}
# Calls of this file, between what reads and where it is noted.
_OWN_FRAMES = 2


@dataclass(frozen=True)
class Read:
    """
    A place that reads the device, or that runs an operator on the host: what does it, as it is written; its line,
    empty where none is known; whether it is within a step, whose program ends there; and the operator that ran on the
    host, empty for a plain read.
    """

    what: str
    place: str
    in_step: bool
    operator: str


class ReadFinder(TorchFunctionMode):
    """
    While it is entered, from an optimizer step on, notes each call of PyTorch from Python that reads the device.

    It costs a microsecond or two for each call, so it is entered only where reads were counted.
    """

    def __init__(self, insight: Insight, step: int):
        super().__init__()
        self._insight = insight
        self.step, self.reads_before = step, insight.stray_reads()
        self._on_host = insight.operators_on_host()
        self.found: Counter[Read] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        before = self._insight.traffic()
        result = func(*args, **(kwargs or {}))
        if self._insight.traffic() != before and self._insight.has_read(before, result):
            self._note(func)
        return result

    def _note(self, func) -> None:
        on_host = self._insight.operators_on_host()
        operators = [name for name, count in on_host.items() if count != self._on_host.get(name)]
        self._on_host = on_host
        frames = list(current_frames())
        line = own_line(frames)
        if line is None:
            line = library_line(frames[_OWN_FRAMES:])
            if line is not None and package_of(line.file) == "hf_tpu_ext":
                return
        self.found[
            Read(
                what=_WRITTEN.get(func.__name__, f".{func.__name__}()"),
                place="" if line is None else describe_line(line),
                in_step=any(frame.function == "training_step" for frame in frames),
                operator=operators[0] if operators else "",
            )
        ] += 1
