"""Ends each program of a step, and says when one is compiled, and why."""

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.insight import FOLDED_NUMBERS, Listing, SourceLine
from ..errors import UserError
from ..formatting import count_each, format_size
from .recompile_cause import Cause, Dependencies, cause_of, compare_dependencies, compare_operations, count_differences
from .source_lines import OF_MODELS, describe_line, explain_library, library_line, own_line, package_of


logger = logging.get_logger(__name__)

# Lines about one program, before further recompiles with the advice of these are only counted.
_MOST_LINES = 5
# Seconds of a compilation that is told of where there are no progress bars.
_LONG = 5.0
# Compiled states of one program that a further one is compared with.
_MOST_COMPARED = 8
# Steps whose programs are listed after a recompile that nothing but their difference explains, and before the first where steps are
# traced.
_COMPARED_STEPS, _FIRST_RUNS = 8, 2
# Where the trainer runs what was recorded and not run yet, which callbacks may have left. So many such graphs are no recompiles: a buffer
# that is filled with 0 and later with 1 is two.
_RUN_WHAT_IS_LEFT, _MOST_LEFT = {"training_step", "_take_train_metrics"}, 8


@dataclass(frozen=True)
class ProgramEvent:
    """
    A program that was compiled.

    Args:
        step (`int`, *optional*): Optimizer step under way, from 1; `None` before the first.
        kind (`str`):
            What it does, e.g. `"training step"`; `"other graph"` is of a log, of samples or of the state of the optimizer.
        shape (`tuple[int, ...]`): Shape of its batch; empty where it has none.
        seconds (`float`): Seconds that its compiling, or its loading, took.
        compiled (`bool`): Whether it was compiled. Otherwise it was loaded from the compilation cache.
        cause (`str`, *optional*): Why it was compiled again; `None` for the first of its kind and shape.
        advice (`str`, *optional*): What keeps it from being compiled again; empty where nothing needs to.
    """

    step: int | None
    kind: str
    shape: tuple[int, ...]
    seconds: float
    compiled: bool
    cause: str | None
    advice: str | None


class TooManyRecompiles(UserError):
    """A run compiled programs again more often than `max_recompiles` allows."""


@dataclass
class _ProgramHistory:
    """What is known of a program: how often it ran, and what it depended on whenever it was compiled."""

    runs: int = 0
    num_warnings: int = 0
    #: Advice that was given: causes with numbers differ each time.
    advice: set[str] = field(default_factory=set)
    #: Place in the events of a recompile whose cause is not found yet.
    open_event: int | None = None
    dependencies: list[Dependencies] = field(default_factory=list)
    #: Says what Python may read otherwise than when it was compiled last, as a clause.
    find_change: Callable[[], str | None] | None = None
    #: Whether a run has shown since that steps do not change it by themselves, and what they have changed where they do.
    is_stable: bool = False
    changed_by_steps: str | None = None
    operations: Listing | None = None
    #: The step whose operations these are; of a line of the user's, the first that compiled a graph there.
    step: int | None = None

    def is_told(self, cause: Cause | None) -> bool:
        """Whether a further recompile with this cause, or one that is not known yet, is told of."""
        return self.num_warnings < _MOST_LINES or (cause is not None and cause.advice not in self.advice)


class ProgramWatch:
    """
    Ends programs, and tells a person when one is compiled, when one is compiled again, and why.

    Nothing is gathered for a step that compiles nothing. Where the cause of a compile is not found in the batch, the
    parameters, the settings or the optimizer, the operations of the next steps' programs are compared.

    Args:
        backend ([`Backend`]): The backend in use.
        find_dependencies (`Callable[[], Dependencies]`): Tells what the step under way depends on.
        quiet (`bool`, *optional*, defaults to `False`): Whether to tell of no first compilation.
        bars (`bool`, *optional*, defaults to `True`):
            Whether there are progress bars. Without them, only first compilations are told of that take long.
        find_batch_source (`Callable[[], str]`, *optional*):
            Says in words who makes the batches, by default the data collator.
        note_python (`Callable[[], Callable[[], str | None]]`, *optional*):
            Notes what Python may read. What it returns says what has changed since.
        find_own_code (`Callable[[], str]`, *optional*):
            Names code of the user's that runs within a step; empty where there is none.
        find_callbacks (`Callable[[], str]`, *optional*): Names the user's callbacks.
        find_why_traced (`Callable[[], str | None]`, *optional*):
            Says why the step under way is traced, as a clause; `None` if it is not, or is no step of training.
        find_results (`Callable[[], list[torch.Tensor]]`, *optional*):
            Lists tensors that the program about to end computes; none if it is not one of training.
        max_recompiles (`int`, *optional*): How many programs may be compiled again.
    """

    def __init__(
        self,
        backend: Backend,
        find_dependencies: Callable[[], Dependencies],
        quiet: bool = False,
        bars: bool = True,
        find_batch_source: Callable[[], str] = lambda: "the data collator",
        note_python: Callable[[], Callable[[], str | None]] | None = None,
        find_own_code: Callable[[], str] = str,
        find_callbacks: Callable[[], str] = str,
        find_why_traced: Callable[[], str | None] = lambda: None,
        find_results: Callable[[], list[torch.Tensor]] = list,
        max_recompiles: int | None = None,
    ):
        self._backend = backend
        self._quiet, self._bars = quiet, bars
        self._find_dependencies, self._find_batch_source = find_dependencies, find_batch_source
        self._note_python, self._find_own_code = note_python, find_own_code
        self._find_callbacks, self._find_results = find_callbacks, find_results
        self._find_why_traced = find_why_traced
        self._max_recompiles = max_recompiles
        self._histories: dict[Hashable, _ProgramHistory] = {}
        # Programs that are compiled outside of the trainer's own, by the line that asks for their results, and those without one.
        self._others: dict[str, _ProgramHistory] = {}
        self._left = _ProgramHistory()
        self._spent = backend.counters()
        self._compiles = backend.compiles()
        self._compare = 0
        self._cut: SourceLine | None = None
        # The last line of a model's library that ended a program within a step, and the one that was told of.
        self._library_cut: SourceLine | None = None
        self._told_cut: SourceLine | None = None
        # Whether all compilations have ended. Where operators are programs, the runtime compiles them while Python goes on.
        self._is_settled = True
        #: Optimizer step under way, from 1; `None` outside of training.
        self.step: int | None = None
        self.recompiles = 0
        #: What was compiled, in order.
        self.events: list[ProgramEvent] = []
        self._first = 0

    def begin(self, is_traced: bool) -> None:
        """Begin a training run. Where steps are traced, code of the user's may record something else each time."""
        self.step = None
        self._backend.insight.note_lines(is_traced)

    def count_from_here(self) -> None:
        """What was compiled until now is not of the run that begins."""
        self.note_others()
        self._is_settled = True
        self._first = len(self.events)

    def expect_others(self) -> None:
        """Take the next programs for the first of their kind and shape: what steps compute is to be something else."""
        self._histories.clear()

    @property
    def events_of_run(self) -> list[ProgramEvent]:
        """What was compiled since the last training run began."""
        return self.events[self._first :]

    @property
    def programs(self) -> list[Hashable]:
        """The programs seen so far."""
        return list(dict.fromkeys((kind, shape) for kind, shape, _ in self._histories))

    def end(
        self,
        kind: str,
        shape: tuple[int, ...],
        where: str,
        execute: Callable[[], Any] | None = None,
        settle: bool = False,
    ) -> Any:
        """
        End the program recorded so far, which does e.g. a `"training step"` for a batch of a shape, at a place in the
        run, e.g. `"step 12"`. Returns what `execute` does, which compiles and starts it, by default [`Backend.end_step`].
        Raises [`TooManyRecompiles`] where it was compiled again, and that too often.

        Where operators are programs, what was compiled is counted at the first of a kind and shape, and when it is to
        `settle`, since the device is waited for.
        """
        execute = self._backend.end_step if execute is None else execute
        # A step that is traced from now on is another program than one that could be replayed.
        is_traced = execute == self._backend.end_step
        history = self._histories.setdefault((kind, shape, is_traced), _ProgramHistory())
        if is_traced and self._backend.compiles_operators:
            if history.runs and not settle:
                return None
            execute, self._is_settled = self._backend.wait, True
        else:
            self.note_others()
        operations = self._list_operations(history, is_recorded=execute != self._backend.end_step)
        with self._backend.insight.own_reads():
            if history.runs:
                program = execute()
            else:
                with self._compiling(f"{kind} {format_size(shape)}"):
                    program = execute()
        cut, self._cut = self._cut, None
        history.runs += 1
        is_compiled = self._backend.compiles() > self._compiles
        if is_compiled or history.runs == 1:
            # Where it was not compiled, an earlier run of this process had the same program.
            dependencies = self._find_dependencies()
            cause = self._find_cause(history, dependencies, operations, cut) if history.runs > 1 else None
            history.dependencies = [*history.dependencies, dependencies][-_MOST_COMPARED:]
            if self._note_python is not None:
                history.find_change, history.is_stable = self._note_python(), False
        elif history.find_change is not None and not history.is_stable:
            # What steps change by themselves explains nothing.
            history.changed_by_steps, history.is_stable = history.find_change(), True
            if history.changed_by_steps is not None:
                history.find_change = None
        if is_compiled:
            # Calls of the trainer's own.
            self._backend.insight.compile_sites()
            is_first_traced = is_traced and history.runs == 1 and (kind, shape, False) in self._histories
            seconds = self._note_event(kind, shape, self._replay_ended() if is_first_traced else cause)
            again = f"recompilation of the {kind} for batches of {format_size(shape)} ({seconds:.1f} s)"
            self._warn(history, f"{where}: {again}", cause)
        elif history.open_event is not None and (cause := self._compare_with_last(history, operations)) is not None:
            # The program that ran again is compared with the one that was recompiled.
            index, history.open_event = history.open_event, None
            event = self.events[index] = replace(self.events[index], cause=cause.what, advice=cause.advice)
            _tell(f"step {event.step}: cause of the recompilation of the {kind}: {cause.what}. {cause.advice}")
        if operations is not None:
            history.operations, history.step = operations, self.step
        elif is_compiled and history.runs > 1 and history.open_event is None:
            # What was listed is the program before this one, whose cause is told: the next run is listed, for later ones to compare.
            history.operations, self._compare = None, max(self._compare, 1)
        return program

    def _replay_ended(self) -> Cause:
        """What a line has said, see [`CompiledFunction.refuse`], and is no recompile to be told of again."""
        why = self._find_why_traced()
        reason = "" if why is None else f": {why}"
        return Cause(f"replay is off from here on, and a graph that is traced each time is another one{reason}", "")

    def note_others(self) -> None:
        """
        Note what was compiled since the last program ended, outside of the trainer's own programs. Cheap if nothing
        was. Raises [`TooManyRecompiles`] where one line of code has programs compiled again, and that too often.
        """
        count = self._backend.compiles() - self._compiles
        if self._backend.compiles_operators:
            is_settled, self._is_settled = self._is_settled, False
            if not is_settled:
                # Programs of a step that has not been counted are among them.
                return
        if not count:
            return
        sites = self._backend.insight.compile_sites()[-count:]
        if self._backend.compiles_operators:
            # A log, an evaluation or a checkpoint has compiled them: they are one event.
            count = 1
        seconds = (self._backend.counters().compile_seconds - self._spent.compile_seconds) / count
        for frames in [*sites, *[()] * (count - len(sites))]:
            self._note_other(frames, seconds)

    def _note_other(self, frames: Sequence[SourceLine], seconds: float) -> None:
        # The backward pass, in which checkpointed layers run again, has a thread of its own.
        in_backward = bool(frames) and frames[-1].file == torch.autograd.function.__file__
        line, in_step = own_line(frames), in_backward or any(frame.function == "training_step" for frame in frames)
        if line is None:
            library = library_line(frames) if in_step else None
            if library is not None and package_of(library.file) in OF_MODELS:
                self._library_cut = library
            # A log, the first state of the optimizer, samples: what a run does once or at every log.
            cause, functions = None, {frame.function for frame in frames}
            if "flush" in functions and not functions.isdisjoint(_RUN_WHAT_IS_LEFT):
                self._left.runs += 1
                if self._left.runs > _MOST_LEFT and (callbacks := self._find_callbacks()):
                    advice = "Keep the shapes and Python numbers of what it computes on the device the same, or compute on the host."
                    cause = Cause(f"code between steps compiles another graph (callbacks: {callbacks})", advice)
            self._note_event("other graph", (), cause, seconds)
            again = f"recompilation outside of the training steps ({seconds:.1f} s, number {self._left.runs} there)"
            self._warn(self._left, f"step {self.step}: {again}", cause)
            return
        if in_step:
            self._cut = line
        place = describe_line(line)
        history = self._others.setdefault(place, _ProgramHistory())
        history.runs += 1
        history.step = self.step if history.step is None else history.step
        cause = None
        # Activation checkpointing runs a line twice in a step, which are two graphs.
        if history.runs > 1 and not (in_step and history.step == self.step):
            advice = "Keep its shapes and Python numbers the same, or fetch the tensors with trainer.backend.fetch and compute on the host."
            if in_step:
                advice = (
                    "It reads the device within the step: keep the tensor in a buffer of the model, and fetch it in on_log with "
                    "trainer.backend.fetch."
                )
            cause = Cause(f"{place} compiles another graph", advice)
        self._note_event(f"graph of {place}", (), cause, seconds)
        where = "outside of training" if self.step is None else f"step {self.step}"
        what = "within the step" if in_step else "outside of the training steps"
        again = f"recompilation {what} ({seconds:.1f} s, number {history.runs} at this line)"
        self._warn(history, f"{where}: {again}", cause)

    # ---- Causes ----

    def _list_operations(self, history: _ProgramHistory, is_recorded: bool) -> Listing | None:
        """The program about to run, where it is to be compared with others: listing it takes longer than a step."""
        num_left = 0 if is_recorded else _FIRST_RUNS - history.runs
        is_listed = self._compare > 0 or num_left > 0
        self._compare = max(0, self._compare - 1)
        self._backend.insight.note_lines(self._compare > 0 or num_left > 1)
        return self._backend.insight.operations(self._find_results()) if is_listed else None

    def _find_cause(
        self, history: _ProgramHistory, dependencies: Dependencies, operations: Listing | None, cut: SourceLine | None
    ) -> Cause:
        cause = None
        if history.dependencies:
            nearest = min(reversed(history.dependencies), key=partial(count_differences, dependencies))
            cause = compare_dependencies(nearest, dependencies, self._find_batch_source())
        if cause is None and cut is not None:
            return Cause(
                f"{describe_line(cut)} cuts the graph within the step",
                "Remove device-to-host syncs, print and torch_xla.sync from the step.",
            )
        self._told_cut = self._told_cut or self._library_cut
        if cause is not None and cause.of_list and (line := self._told_cut) is not None:
            words = f"tensors in `{cause.of_list}` have other shapes, and {describe_line(line)} reads within the step"
            return Cause(words, explain_library(package_of(line.file)))
        # Where a program that was not listed was compiled in between, this one is compared with one of an earlier step, and later ones
        # say nothing about that.
        when = "" if history.open_event is None else f" at step {history.step}"
        history.open_event = None
        change = None if history.find_change is None else history.find_change()
        difference = self._compare_with_last(history, operations, when)
        causes = [None if change is None else cause_of(change), difference]
        # What code of the user's notes at each step, such as a count, explains nothing. Without such code, an operator explains less.
        if not history.is_stable and self._find_own_code():
            causes.reverse()
        cause = next(filter(None, [cause, *causes]), None)
        if cause is difference and history.is_told(cause):
            # What has changed once may change at each step.
            self._compare = _COMPARED_STEPS
            self._backend.insight.note_lines(True)
        if cause is None:
            history.open_event = len(self.events)
            cause = Cause(
                "batch and optimizer are unchanged, so a Python number or a branch changed"
                + (f" in {own_code}" if (own_code := self._own_code_of(history)) else ""),
                f"torch_xla folds {FOLDED_NUMBERS} into the graph, and sends equal numbers as one: send such a number as a tensor, "
                "trainer.backend.send(torch.tensor(value)), or with step_replay=True keep it in a buffer of the model, which a callback "
                "fills. Where a size or a slice bound changes, mask instead.",
            )
        return cause

    def _compare_with_last(self, history: _ProgramHistory, operations: Listing | None, when: str = "") -> Cause | None:
        """The first operation in which the program listed last, which ran `when`, differs from this one, where both were listed."""
        if history.operations is None or operations is None:
            return None
        return compare_operations(history.operations(), operations(), when, partial(self._own_code_of, history))

    def _own_code_of(self, history: _ProgramHistory) -> str:
        own_code, changed = self._find_own_code(), history.changed_by_steps
        return f"{own_code} (between earlier steps, {changed})" if own_code and changed is not None else own_code

    # ---- Words and counts ----

    def _note_event(
        self, kind: str, shape: tuple[int, ...], cause: Cause | None, seconds: float | None = None
    ) -> float:
        """Note a program, which by default took all seconds of compiling since the last one. Returns its seconds."""
        counters = self._backend.counters()
        seconds = (counters - self._spent).compile_seconds if seconds is None else seconds
        is_compiled = (counters - self._spent).loads < max(1, self._backend.compiles() - self._compiles)
        self._spent, self._compiles = counters, self._backend.compiles()
        what, advice = (None, None) if cause is None else (cause.what, cause.advice)
        self.events.append(ProgramEvent(self.step, kind, shape, seconds, is_compiled, what, advice))
        return seconds

    def _warn(self, history: _ProgramHistory, again: str, cause: Cause | None) -> None:
        if cause is None:
            return
        line = f"{again}: {cause.what}. {cause.advice}"
        self.recompiles += 1
        if self._max_recompiles is not None and self.recompiles > self._max_recompiles:
            raise TooManyRecompiles(
                f"{line} This was recompilation {self.recompiles}; max_recompiles={self._max_recompiles}."
            )
        if history.is_told(cause):
            history.num_warnings += 1
            history.advice.add(cause.advice)
            is_open = history.open_event is not None
            end = " If one of the next steps computes it again, a further message names its line." if is_open else ""
            end += " Further ones like these are only counted." if history.num_warnings == _MOST_LINES else ""
            _tell(f"{line}{end}")

    def describe(self) -> str | None:
        """Sum up in a line what the run has compiled again; `None` if nothing was."""
        again = [event for event in self.events_of_run if event.cause is not None]
        if not again:
            return None
        seconds, causes = sum(event.seconds for event in again), count_each(event.cause for event in again)
        return f"Recompilations: {len(again)} in {seconds:.1f} s. {causes}"

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        if self._quiet:
            yield
            return
        is_done = threading.Event()
        start, compiles = time.monotonic(), self._backend.compiles()
        # `None`: in a file it would leave a terminal's escapes. There, a line a minute says that it goes on.
        bar = tqdm(
            total=0,
            bar_format="{desc}",
            leave=False,
            desc=f"compiling the {what}",
            file=sys.stderr,
            disable=None if self._bars else True,
        )

        def tick() -> None:
            while not is_done.wait(60.0 if bar.disable else 1.0):
                line = f"compiling the {what}: {time.monotonic() - start:.0f} s"
                if bar.disable:
                    tqdm.write(line, file=sys.stderr)
                else:
                    bar.set_description_str(line)

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            is_done.set()
            ticker.join()
            bar.close()
        verb, seconds = "compiled" if self._backend.compiles() > compiles else "found", time.monotonic() - start
        if self._bars or seconds >= _LONG:
            tqdm.write(f"{verb} the {what} in {seconds:.1f} s", file=sys.stderr)


def _tell(line: str) -> None:
    # Behind a progress bar, the line would be missed.
    with tqdm.external_write_mode():
        logger.warning(line)
