"""Writes down what a run does while it does it, and has its report made at the end."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.insight import Counters
from ..report.record import RecordWriter
from ..watch.compilations import ProgramEvent
from .run_lines import step_of_loaded_weights
from .step_status import StepStatus


logger = logging.get_logger(__name__)

# The record keeps so much of an error's text. The compiler's errors take pages.
_MOST_CHARACTERS = 2_000


class RunRecord(TrainerCallback):
    """
    Keeps the record of a run in its output directory, and makes the report of it when the run ends.

    The record is written line by line, so that a run that is killed can be reported. Where it cannot be written, a line says
    so, and training goes on without it.

    Args:
        backend ([`Backend`]): The backend in use.
        describe (`Callable[[], dict[str, Any]]`): Tells what is known about a run when it begins, as JSON.
        status ([`StepStatus`], *optional*): What times the steps.
        programs (`Callable[[], Sequence[ProgramEvent]]`): Lists the programs that the run has compiled so far.
        spent (`Callable[[], Counters]`): Tells what the run has compiled, run and transferred so far.
        why_traced (`Callable[[], str | None]`): Says why steps are not replayed, as a clause; `None` if they are.
        syncs (`Callable[[], list[str]]`): Names what has read the device outside this package.
        signal (`Callable[[], str | None]`): Names what told the run to stop from outside, e.g. `"SIGTERM"`.
    """

    def __init__(
        self,
        backend: Backend,
        describe: Callable[[], dict[str, Any]],
        status: StepStatus | None,
        programs: Callable[[], Sequence[ProgramEvent]],
        spent: Callable[[], Counters],
        why_traced: Callable[[], str | None],
        syncs: Callable[[], list[str]],
        signal: Callable[[], str | None],
    ):
        self._backend = backend
        self._describe = describe
        self._status = status
        self._programs = programs
        self._spent, self._why_traced, self._syncs, self._signal = spent, why_traced, syncs, signal
        #: Where the record of the next run goes: the directory of its checkpoints.
        self.directory = ""
        self._programs_written: list[ProgramEvent] = []
        self._samples: Sequence[Mapping[str, str]] = ()
        self._writer: RecordWriter | None = None

    def _write(self, event: str, ago: float = 0.0, **values: Any) -> None:
        """Add a line, `at` the seconds since training began. The clock is one that never goes back."""
        if self._writer is None:
            return
        try:
            self._writer.write(event, at=round(max(0.0, time.perf_counter() - ago - self._begin), 3), **values)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        logger.warning(f"run.jsonl cannot be written ({error}). Training continues; the report ends here.")

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin = time.perf_counter()
        if self._status is not None:
            # Callbacks before this one may have taken minutes, as samples do.
            self._begin -= self._status.clock.copy_seconds().total()
        self._programs_written = []
        if not state.is_world_process_zero:
            return
        try:
            self._writer = RecordWriter(self.directory, anew=state.global_step == 0)
        except OSError as error:
            self._give_up(error)
        self._write(
            "begin",
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            first_step=state.global_step,
            max_steps=state.max_steps,
            **self._describe(),
        )
        if self._samples:
            self._write("samples", step=None, rows=self._samples)
            self._samples = ()

    def on_step_end(self, args, state, control, **kwargs):
        if self._writer is not None:
            self._write_programs(state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):
        self.on_step_end(args, state, control)

    def _write_programs(self, step: int) -> None:
        events = list(self._programs())
        if events == self._programs_written:
            return
        for before, event in zip(self._programs_written, events, strict=False):
            # A step later it may turn out why.
            if event is not before:
                self._write("cause", **asdict(event))
        new = events[len(self._programs_written) :]
        self._programs_written = events
        ago = sum(event.seconds for event in new)
        for event in new:
            # They came one after the other, the last one just now.
            ago -= event.seconds
            self._write("program", ago, **{**asdict(event), "step": step if event.step is None else event.step})

    def on_log(self, args, state, control, logs, **kwargs):
        if self._writer is not None:
            self._write("log", step=state.global_step, logs=logs, **self._totals())

    def on_save(self, args, state, control, **kwargs):
        if self._writer is not None:
            self._write("save", step=state.global_step, **self._totals())

    def _totals(self) -> dict[str, Any]:
        totals = {"counters": asdict(self._spent()), "why_traced": self._why_traced(), "syncs": self._syncs()}
        if self._status is None:
            return {**totals, "phases": {}, "step_times": {}, "batches": []}
        return {
            **totals,
            "phases": {name: round(seconds, 6) for name, seconds in self._status.clock.copy_seconds().items()},
            "step_times": self._status.step_times,
            "batches": [[shape, list(count)] for shape, count in self._status.batches.items()],
        }

    def note_error(self, error: BaseException, step: int) -> None:
        """Keep what ended the run after so many optimizer steps, and make its report."""
        self._write_programs(step)
        self._write("error", step=step, error=f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS])
        self._end()

    def keep_samples(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Keep prompts with their answers, for the report: those of before training for when the record begins."""
        self._samples = rows
        self._write("samples", step=None, rows=rows)

    def on_train_end(self, args, state, control, **kwargs):
        self._write_programs(state.global_step)
        cache = self._backend.cache_use()
        best = {}
        if (best_step := step_of_loaded_weights(args, state)) is not None:
            best = {"best_step": best_step, "best_by": args.metric_for_best_model}
        stopped = {}
        if state.global_step < state.max_steps:
            stopped = {"stopped_by": self._signal() or "a callback (early stopping is one)"}
        cache = cache and asdict(cache)
        self._write("end", step=state.global_step, cache=cache, **best, **stopped, **self._totals())
        self._end()

    def _end(self) -> None:
        """Make the report of the record."""
        if self._writer is None:
            return
        self._writer = None
        from ..report.make import describe_ended_run

        try:
            text = describe_ended_run(self.directory)
        except Exception as error:
            # The trained model is not lost for a page about it, nor the error that has ended a run.
            is_told = isinstance(error, ValueError | OSError | ImportError)
            logger.warning(
                f"There is no report of this run: {error} To make it: hf-tpu report {shlex.quote(self.directory)}",
                exc_info=None if is_told else error,
            )
            return
        # Nobody may be reading, which has ended the run then.
        with suppress(BrokenPipeError):
            tqdm.write(text)
