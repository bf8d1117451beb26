"""Device-to-host syncs, CPU fallbacks and compilations outside of a run's own graphs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.insight import Insight
from .compilations import ProgramWatch
from .source_lines import (
    OF_MODELS,
    current_frames,
    describe_line,
    explain_library,
    library_line,
    own_line,
    package_of,
)


logger = logging.get_logger(__name__)

# Reads are looked for at most so often in a run, for so many steps: the least tell how often it reads.
_MOST_SEARCHES, _LEAST_STEPS, _MOST_STEPS = 4, 2, 256
# A search begins again where there are so many times more reads than those that were named.
_MORE = 1.5
_AS_WRITTEN = {
    "__bool__": "bool(tensor)",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
    "__index__": "an index",
    "__repr__": "print(tensor)",
    "__format__": "an f-string",
    "__array__": "a NumPy array",
}
# Calls of this file, between the code that reads a tensor and the line that records it; and files of PyTorch that hand calls of tensors on.
_OWN_FRAMES = 2
_HAND_ON = (torch.overrides.__file__, torch._tensor.__file__, torch.nn.parameter.__file__)


@dataclass(frozen=True)
class Read:
    """
    A place that reads the device, or that runs an operator on the host: what does it, as it is written; its line and, if that is
    a library's, the user's that calls it, empty where none is known; the package of a model's code that does it, empty for other code;
    whether it is within a step, whose program ends there, or in `on_log` or the trainer's `log`; and the operator that ran on the
    host, empty for a plain read.
    """

    what: str = ""
    place: str = ""
    library: str = ""
    in_step: bool = False
    in_log: bool = False
    operator: str = ""


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
        self.reads_by_place: Counter[Read] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        before = self._insight.traffic()
        result = func(*args, **(kwargs or {}))
        if self._insight.has_read(before, result):
            self._note(func)
        return result

    def _note(self, func) -> None:
        on_host = self._insight.operators_on_host()
        operators = [name for name, count in on_host.items() if count != self._on_host.get(name)]
        self._on_host = on_host
        frames = list(current_frames())
        line, reads = own_line(frames), next(frame for frame in frames[_OWN_FRAMES:] if frame.file not in _HAND_ON)
        if line is None:
            line = library_line(frames[_OWN_FRAMES:])
            if line is not None and package_of(line.file) == "hf_tpu_ext":
                return
            reads = line
        place, package = "" if line is None else describe_line(line), package_of(reads.file)
        # Operators of a backward pass have no line: that of the call is the same for all of them.
        in_backward = bool(operators) and func is torch.Tensor.backward
        self.reads_by_place[
            Read(
                what=_AS_WRITTEN.get(func.__name__, f".{func.__name__}()"),
                place="" if in_backward else place if reads == line else f"{describe_line(reads)}, called at {place}",
                library=package if package in OF_MODELS else "",
                in_step=any(frame.function == "training_step" for frame in frames),
                in_log=any(frame.function in ("on_log", "log") for frame in frames),
                operator=operators[0] if operators else "",
            )
        ] += 1


class SyncMonitor(TrainerCallback):
    """
    Names device-to-host syncs between two logs, and CPU fallbacks, by their line. Silent where there are none.

    Reads are counted at each log, and at steps 2, 4, 8 and so on. Where there were some that the trainer did not make, the
    calls of the next steps are watched until one of them reads.
    """

    def __init__(self, backend: Backend, watch: ProgramWatch):
        self._backend = backend
        self._watch = watch
        #: What was named, with how often it was seen in a step.
        self.syncs: dict[Read, float] = {}
        self._finder: ReadFinder | None = None
        self._begin()

    def _begin(self) -> None:
        self.syncs.clear()
        self._searches = 0
        self._is_wanted = False
        self._counted_at: int | None = None
        self._first_reads = self._reads = 0
        self._explained_reads = 0.0

    # ---- Events ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin()
        self._watch.count_from_here()

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step
        self._watch.note_others()
        self._watch.step = step + 1
        if self._counted_at is None:
            # What was read before, for samples or in a callback, was read once.
            self._counted_at = step
            self._first_reads = self._reads = self._backend.insight.stray_reads()
        elif not step & (step - 1) and step - self._counted_at > 1:
            self._check(step)
        if self._finder is not None and step - self._finder.step >= (
            _LEAST_STEPS if self._finder.reads_by_place else _MOST_STEPS
        ):
            self._end_search(step)
        if self._is_wanted:
            self._is_wanted = False
            self._searches += 1
            self._finder = ReadFinder(self._backend.insight, step)
            self._finder.__enter__()

    def on_log(self, args, state, control, **kwargs):
        if self._counted_at is not None and state.global_step > self._counted_at:
            self._check(state.global_step)

    def on_train_end(self, args, state, control, **kwargs):
        self._watch.note_others()
        if self._finder is not None:
            self._end_search(state.global_step)
        if state.is_world_process_zero:
            if (line := self._watch.describe()) is not None:
                tqdm.write(line)
            if self.syncs:
                reads, step = self._backend.insight.stray_reads() - self._first_reads, state.global_step
                what = "; ".join(self.describe())
                tqdm.write(f"Device-to-host syncs outside this package: {reads} until step {step}. {what}")
        self.close()

    def close(self) -> None:
        """Stop watching, also where the run was ended by an error."""
        self._watch.step = self._counted_at = None
        self._leave()
        self._backend.insight.note_lines(False)

    # ---- Reads ----

    def _check(self, step: int) -> None:
        reads = self._backend.insight.stray_reads()
        rate = (reads - self._reads) / (step - self._counted_at)
        self._counted_at, self._reads = step, reads
        if rate > _MORE * self._explained_reads and self._finder is None and self._searches < _MOST_SEARCHES:
            self._is_wanted = True

    def _leave(self) -> None:
        if self._finder is not None:
            self._finder.__exit__(None, None, None)
            self._finder = None

    def _end_search(self, step: int) -> None:
        finder, steps = self._finder, step - self._finder.step
        reads = self._backend.insight.stray_reads() - finder.reads_before
        self._leave()
        if not steps or not reads:
            return
        self._explained_reads = reads / steps
        for read, count in (finder.reads_by_place or {Read(): reads}).items():
            if read not in self.syncs:
                times = "once" if count == 1 else f"{count} times"
                logger.warning(
                    f"Steps {finder.step + 1} to {step}: {_describe(read)}, {times} in {steps} steps. {_advise(read)}"
                )
            self.syncs[read] = count / steps

    def describe(self) -> list[str]:
        """What has read the device outside this package, each place in words."""
        return list(map(_describe, self.syncs))


def _describe(read: Read) -> str:
    place = f" [{read.place}]" if read.place else ""
    if read.operator:
        return f"CPU fallback of `{read.operator}`{place or ' in the backward pass'}"
    if not read.what:
        return "a device-to-host sync without a PyTorch call from Python"
    within = " within the step" if read.in_step else ""
    return f"`{read.what}` syncs device to host{within}{place}"


def _advise(read: Read) -> str:
    if read.operator:
        if read.operator.endswith("_backward"):
            advice = (
                f"It is the gradient of `{read.operator.removesuffix('_backward')}`, wherever the model computes that."
            )
        elif read.library:
            advice = f"It is code of {read.library}; CUDA and the CPU have the operator."
        else:
            advice = "Use another operator, or move it to the data collator."
        return f"torch_xla has no program for it here: its inputs are fetched and its outputs sent back at each step. {advice}"
    if read.in_step:
        own = ": keep it a tensor, and use torch.where instead of a branch."
        advice = f". {explain_library(read.library)}" if read.library else own
        return f"The host waits, and the device computes its inputs twice{advice}"
    if read.in_log:
        return "The host waits for each: fetch all that you log in one transfer, with trainer.backend.fetch({name: tensor})."
    if read.library:
        return f"The host waits for the device. {explain_library(read.library)}"
    return "The host waits for the device: fetch it in on_log, in one transfer, with trainer.backend.fetch."
