"""Where the time of a run goes, as its host sees it, and how fast tokens are trained on."""

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from ..backends.base import Backend
from ..report.metrics import BESIDES_STEPS, CLASSES_PER_DECADE, PHASES


def class_of(seconds: float) -> int:
    """
    The class that a time above 0 is counted in: `class_of(s)` is `k` if `s` is at least `10 ** (k /
    CLASSES_PER_DECADE)` seconds, and less than that of `k + 1`.
    """
    return math.floor(CLASSES_PER_DECADE * math.log10(seconds))


class PhaseClock:
    """
    Divides the host's time into phases. At most one is under way at a time, so they add up to the time that passed. What was
    compiled in one of them, also by code of the user's, is of the phase `"compile"`.

    Args:
        compile_mark (`Callable[[], object]`, *optional*):
            Returns something else once a program was compiled. By default none is.
        compile_seconds (`Callable[[], float]`, *optional*): Tells the seconds of compiling so far.
    """

    def __init__(self, compile_mark: Callable[[], object] = int, compile_seconds: Callable[[], float] = float):
        #: Seconds of each phase that has ended, by its name.
        self.seconds: Counter[str] = Counter()
        self._phase: str | None = None
        self._since = 0.0
        self._compile_mark, self._compile_seconds = compile_mark, compile_seconds
        self._mark, self._seconds_of_compiling = compile_mark(), compile_seconds()

    def enter(self, phase: str | None) -> str | None:
        """End the phase under way, which is returned, and begin another; `None` stops the clock."""
        now, mark = time.perf_counter(), self._compile_mark()
        previous = self._phase
        if previous is not None:
            self.seconds[previous] += now - self._since
        if mark != self._mark:
            before, self._mark, self._seconds_of_compiling = self._seconds_of_compiling, mark, self._compile_seconds()
            if previous is not None:
                self.seconds[previous] -= self._seconds_of_compiling - before
                self.seconds["compile"] += self._seconds_of_compiling - before
        self._phase, self._since = phase, now
        return previous

    def copy_seconds(self) -> Counter[str]:
        """A copy of `seconds`, the phase under way included."""
        self.enter(self._phase)
        return self.seconds.copy()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context that is a phase. What was under way goes on after it."""
        previous = self.enter(name)
        try:
            yield
        finally:
            self.enter(previous)

    def rename(self, phase: str, to: str) -> None:
        """Count all time of a phase, which is not to remain, as another's."""
        seconds = self.seconds.pop(phase, 0.0)
        self.seconds[to] += seconds


class BatchCount(NamedTuple):
    """How many batches of one shape were trained on, their tokens without pads, and all tokens that were computed."""

    batches: int = 0
    tokens: int | torch.Tensor = 0
    padded_tokens: int = 0

    def __add__(self, other: "BatchCount") -> "BatchCount":
        return BatchCount(*map(operator.add, self, other))


class StepStatus(TrainerCallback):
    """
    Times the phases of steps and counts tokens, for the logs of a run.

    Clocks are read on the host, where the trainer passes from one thing to the next. Nothing is read from the device and
    nothing waits for it but before a log, which reads it anyway: what the device does while the host goes on is seen only as
    the time for which the host has to wait.

    Args:
        backend ([`Backend`]): The backend in use.
        kind_of_step (`Callable[[], str]`):
            Tells how the step that ends was run: `"trace"`, `"replay"`, or on an eager device `"step"`.
        flops (`Callable[[tuple[int, int]], float | None]`, *optional*):
            Arithmetic of training on a batch of a shape, if it is known.
    """

    def __init__(
        self,
        backend: Backend,
        kind_of_step: Callable[[], str],
        flops: Callable[[tuple[int, int]], float | None] | None = None,
    ):
        self._backend = backend
        self._kind_of_step = kind_of_step
        self._flops = None if backend.chip is None else flops
        self.clock = PhaseClock(backend.compile_mark, lambda: backend.counters().compile_seconds)
        self._reset()

    def _reset(self) -> None:
        self.clock.seconds.clear()
        self._before_window = Counter()
        self._before_step = Counter()
        self._steps = 0
        self._has_stepped = False
        self._window: dict[tuple[int, ...], BatchCount] = {}
        self._since_log: dict[tuple[int, ...], BatchCount] = {}
        #: Batches since the run began, by their shape. Batches of all shapes count together where nothing is compiled for a shape.
        self.batches: dict[tuple[int, ...], BatchCount] = {}
        #: How many steps took how long, by phase and class of [`class_of`]; `"total"` is all of them together.
        self.step_times: dict[str, Counter[int]] = {}

    # ---- Where the trainer passes ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._reset()
        self.clock.enter("other")

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.enter("step")

    def on_substep_end(self, args, state, control, **kwargs):
        self.clock.enter("step")
        self.clock.rename("step", self._kind_of_step())

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.enter("other")
        self.clock.rename("step", self._kind_of_step())
        self._steps += 1
        self._has_stepped = True

    def on_save(self, args, state, control, **kwargs):
        # A run that is killed goes on from here.
        self._take_batches()

    def on_train_end(self, args, state, control, **kwargs):
        self.end_step()
        # Batches of the steps since the last log are counted, too.
        self._take_batches()
        self.clock.enter(None)

    def end_step(self) -> None:
        """Note what the step that ended took, its log included. Called when the next one asks for its data."""
        if not self._has_stepped:
            # The beginning of training.
            self._before_step = self.clock.copy_seconds()
            return
        self._has_stepped = False
        seconds_of, before = self.clock.copy_seconds(), self._before_step
        self._before_step = seconds_of
        total = 0.0
        for phase, seconds_so_far in seconds_of.items():
            seconds = seconds_so_far - before[phase]
            if seconds > 0 and phase not in BESIDES_STEPS:
                total += seconds
                self._note_time(phase, seconds)
        if total:
            self._note_time("total", total)

    def _note_time(self, phase: str, seconds: float) -> None:
        self.step_times.setdefault(phase, Counter())[class_of(seconds)] += 1

    def count(self, batch: Mapping[str, Any], computed_shape: tuple[int, ...] | None = None) -> None:
        """
        Count the tokens of a batch as the trainer has it, preferably on the host. It is computed in the shape
        `computed_shape` where rows or columns were added to it. One without `input_ids` of shape `(batch, length)` is not counted.
        """
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if ids is None:
            return
        has_mask = mask is not None and mask.shape == ids.shape
        computed_shape = tuple(computed_shape or ids.shape)
        tokens = mask.sum() if has_mask else ids.shape[0] * math.prod(computed_shape[1:])
        count = BatchCount(1, tokens, math.prod(computed_shape))
        shape = computed_shape if self._backend.static_shapes else ()
        self._window[shape] = self._window[shape] + count if shape in self._window else count

    # ---- What a log shows ----

    def take_speed(self) -> dict[str, float]:
        """What was measured since the last call, by its name in a log; empty if no step has ended since."""
        if not self._steps:
            return {}
        seconds_of = self.clock.copy_seconds()
        spent, self._before_window = seconds_of - self._before_window, seconds_of
        in_steps = sum(seconds for phase, seconds in spent.items() if phase not in BESIDES_STEPS)
        logs = {"step_time": round(in_steps / self._steps, 6)}
        self._steps = 0
        self._take_batches()
        counts, self._since_log = self._since_log, {}
        if counts:
            total = sum(counts.values(), BatchCount())
            logs["tokens_per_second"] = round(total.tokens / in_steps, 3)
            logs["padded_tokens_per_second"] = round(total.padded_tokens / in_steps, 3)
            per_shape = [None if self._flops is None else self._flops(shape) for shape in counts]
            if None not in per_shape:
                flops = sum(count.batches * each for count, each in zip(counts.values(), per_shape, strict=True))
                chips = self._backend.num_chips * self._backend.processes.row_shards
                logs["mfu"] = round(flops / in_steps / (self._backend.chip.flops_per_second * chips), 4)
        if (peak := self._backend.peak_memory()) is not None:
            logs["peak_memory_gb"] = round(peak / 1e9, 3)
        return logs

    def _take_batches(self) -> None:
        """Add the batches of all processes, which log at once, since the last call to those of the run, and of the next log."""
        # Sums on a device are read here, once a log; on XLA batches are counted on the host.
        counts = {shape: count._replace(tokens=int(count.tokens)) for shape, count in self._window.items()}
        self._window = {}
        total = self._backend.processes.total
        counts = {shape: BatchCount(*map(int, total(list(count)))) for shape, count in counts.items()}
        for shape, count in counts.items():
            for sums in (self.batches, self._since_log):
                sums[shape] = sums.get(shape, BatchCount()) + count

    def take_phases(self) -> dict[str, float]:
        """Seconds of each phase since training began, by its name in the last log of a run."""
        spent = self.clock.copy_seconds()
        return {f"phase/{phase}": round(spent[phase], 6) for phase in PHASES if phase in spent}
