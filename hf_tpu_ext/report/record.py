"""The record of a run: lines of JSON in its output directory, written while it trains, and read for a report."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic_write import write_atomically
from ..errors import UserError
from ..redaction import redact


#: Name of the file in the output directory.
RECORD_NAME = "run.jsonl"
#: What is written of one run into its output directory: the record, and the report on it.
RUN_FILES = (RECORD_NAME, "report.html", "report.md")
#: The directory in it that TRL writes completions to, with `log_completions`.
COMPLETIONS = "completions"
#: How many completions of a step a report shows.
SAMPLES = 4
# What is known of every run when it begins.
_BEGIN_KEYS = {"time", "max_steps", "versions", "arguments", "changed", "model", "rows", "backend", "facts"}


class RecordWriter:
    """
    Writes the record of a run. Whatever ends the run, what was written before can be read. A run that begins `anew`
    replaces an earlier record in its directory, others go on with it. Raises `OSError` where it cannot be written.
    """

    def __init__(self, output_dir: str | Path, anew: bool):
        self._path = Path(output_dir, RECORD_NAME)
        # That of a trial of a search may not be there.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            write_atomically(self._path, b"")
        # A run that was killed may have left half a line.
        elif self._path.is_file() and not (b"\n" + self._path.read_bytes()).endswith(b"\n"):
            self._append("\n")

    def write(self, event: str, **values: Any) -> None:
        """
        Add a line of what an event says, as JSON, without secrets. What is no JSON is written as text. Raises `OSError`
        where it cannot be.
        """
        self._append(json.dumps(redact({"event": event, **values}), default=str) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def is_record(path: str | Path) -> bool:
    """Whether a file is the record of a run, which may have been killed before it wrote a line."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            line = file.readline()
        return not line or json.loads(line)["event"] == "begin"
    except (OSError, ValueError, TypeError, KeyError):
        return False


@dataclass
class Session:
    """
    One call of `train`: a run that was resumed has several. Of each what was known when it began, its seconds, its last
    optimizer step, its compilations and its totals (phases, step times, batches, counters, why steps are traced, and the
    optimizer step after which they were recorded) as far as they are recorded, and what was known when it ended, or the
    error that ended it; both `None` if it was killed.
    """

    begin: dict[str, Any]
    seconds: float = 0.0
    last_step: int = 0
    compilations: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    error: str | None = None


@dataclass
class Run:
    """
    A run, as far as it is recorded.

    Args:
        name (`str`): Its directory, for people.
        sessions (`list[Session]`): The calls of `train`, in order.
        logs (`list[dict[str, float]]`):
            What was logged of training and by callbacks, all of a step together, with `step`, and with `at`, the seconds of
            training before it. Steps that were repeated after a resume are there once.
        evaluations (`list[dict[str, float]]`): What was logged of evaluations.
        programs (`list[dict[str, Any]]`):
            Programs that were compiled or loaded, with `at`, the seconds of training before they were there.
        phases (`Counter[str]`): Seconds of each phase.
        step_times (`dict[str, Counter[int]]`): How many steps took how long, by phase and class of time.
        batches (`dict[tuple[int, ...], list[int]]`):
            Number of batches, tokens and padded tokens, by the shape of the batch.
        samples (`list[dict[str, Any]]`):
            Prompts with what the model has answered: before and after training, or the completions that were rewarded.
        unreadable (`int`): Lines of the record that cannot be read.
    """

    name: str
    sessions: list[Session] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    programs: list[dict[str, Any]] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    step_times: dict[str, Counter[int]] = field(default_factory=dict)
    batches: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    unreadable: int = 0

    @property
    def begin(self) -> dict[str, Any]:
        """What was known when the last session began."""
        return self.sessions[-1].begin

    @property
    def peak_memory(self) -> int | None:
        """Most bytes of memory that were in use at once, where that is known."""
        return max((round(1e9 * value) for _, value in points(self.logs, "peak_memory_gb")), default=None)

    def middle(self, key: str) -> float | None:
        """
        The median of what was logged under a name; `None` where nothing was. The first log of each session has the steps that are
        traced in it, and counts only where there are no others.
        """
        begins = [session.begin["first_step"] for session in self.sessions]
        first = {min((log["step"] for log in self.logs if log["step"] > begin), default=None) for begin in begins}
        logged = points(self.logs, key)
        values = [value for step, value in logged if step not in first] or [value for _, value in logged]
        return statistics.median(values) if values else None

    def values_of(self, keys: Sequence[str]) -> list[tuple[float, float]]:
        """[`points`] of what trainings or evaluations have logged under one of several names."""
        return [point for key in keys for point in points([*self.logs, *self.evaluations], key)]

    @property
    def seconds(self) -> float:
        """Seconds of all sessions."""
        return sum(session.seconds for session in self.sessions)

    @property
    def steps(self) -> int:
        """Optimizer steps that were done."""
        return self.sessions[-1].last_step

    @property
    def steps_in_phases(self) -> int:
        """Optimizer steps that the phases tell of, steps that were run again included."""
        totals = [(session.totals["step"], session.begin["first_step"]) for session in self.sessions if session.totals]
        return sum(last - first for last, first in totals)

    @property
    def why_traced(self) -> str | None:
        """Why steps were not replayed, as a clause, as far as it is recorded."""
        return self.sessions[-1].totals.get("why_traced")

    @property
    def syncs(self) -> list[str]:
        """What has read the device outside this package, as far as it is recorded."""
        return self.sessions[-1].totals.get("syncs") or []

    @property
    def counters(self) -> Counter[str]:
        """What the runtime has compiled, run and transferred in all sessions, as far as it is recorded."""
        return sum((Counter(session.totals.get("counters")) for session in self.sessions), Counter())


def read_run(directory: str | Path) -> Run:
    """Read the record of a run from its output directory. Raises `ValueError` where the directory holds none."""
    path = Path(directory, RECORD_NAME)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        inside = sorted(str(record_file.parent) for record_file in Path(directory).glob(f"*/{RECORD_NAME}"))
        hint = f" Runs in it: {', '.join(inside)}." if inside else ""
        raise UserError(
            f"{directory} is not the directory of a run: {RECORD_NAME} cannot be read there ({error.strerror}).{hint} Give the "
            "output_dir of a run of this package whose run_report was not off."
        ) from error
    run = Run(str(directory))
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["event"] == "begin":
                _begin(run, entry)
            elif run.sessions:
                _add(run, entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            # Half a line, as a run leaves that is killed while it writes; or one that somebody has edited.
            run.unreadable += 1
    if not run.sessions:
        raise UserError(f"{path} is damaged: it has no line about the start of the run. Train again to have a report.")
    run.samples = run.samples or _read_completions(Path(directory, COMPLETIONS), run.steps)
    for totals in [session.totals for session in run.sessions if session.totals]:
        run.phases.update(totals["phases"])
        for phase, classes in totals["step_times"].items():
            run.step_times.setdefault(phase, Counter()).update({int(number): n for number, n in classes.items()})
        for shape, counts in totals["batches"]:
            sums = run.batches.setdefault(tuple(shape), [0, 0, 0])
            run.batches[tuple(shape)] = [one + more for one, more in zip(sums, counts, strict=True)]
    return run


def _read_completions(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Some of the first and the last completions that TRL wrote in so many steps, with `log_completions`."""
    files = sorted(directory.glob("completions_*.parquet"))
    # Files of a longer run before this one may be there.
    files = [file for file in files if int(file.stem.rpartition("_")[2]) <= steps]
    rows = []
    for file in dict.fromkeys([*files[:1], *files[-1:]]):
        import pyarrow.parquet

        rows += pyarrow.parquet.read_table(file).slice(0, SAMPLES).to_pylist()
    return [{name: _text_of(value) for name, value in row.items()} for row in rows]


def _text_of(value: Any) -> Any:
    """The text of messages; what is none, as it is: a reward function may log values of any kind."""
    is_messages = isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    )
    return "\n".join(f"{message['role']}: {message['content']}" for message in value) if is_messages else value


def points(logs: Sequence[Mapping[str, Any]], key: str, over: str = "step") -> list[tuple[float, float]]:
    """The steps, or what `over` names, at which finite numbers were logged under a name, with these numbers."""
    values = [(log[over], log.get(key)) for log in logs]
    return [(place, value) for place, value in values if isinstance(value, int | float) and math.isfinite(value)]


def _begin(run: Run, entry: dict[str, Any]) -> None:
    if missing := _BEGIN_KEYS - entry.keys():
        raise KeyError(*missing)
    first = entry["first_step"]
    # What came after the checkpoint is trained once more.
    run.logs = [log for log in run.logs if log["step"] <= first]
    run.evaluations = [log for log in run.evaluations if log["step"] <= first]
    run.sessions.append(Session(entry, last_step=first))


def _add(run: Run, entry: dict[str, Any]) -> None:
    session = run.sessions[-1]
    at = run.seconds - session.seconds + entry["at"]
    session.seconds = max(session.seconds, entry["at"])
    session.last_step = max(session.last_step, entry["step"] or 0)
    if entry["event"] in ("log", "save", "end"):
        session.totals = {name: entry[name] for name in ("step", "phases", "step_times", "batches")}
        # Records of earlier versions do not have these in every log.
        session.totals |= {name: entry.get(name) for name in ("counters", "why_traced", "syncs")}
    match entry["event"]:
        case "log":
            log = {"step": entry["step"], "at": at, **entry["logs"]}
            if not any(name.startswith("eval_") for name in entry["logs"]):
                # Callbacks may have logged at this step, too.
                if run.logs and run.logs[-1]["step"] == entry["step"]:
                    log |= {**run.logs.pop(), **entry["logs"]}
                run.logs.append(log)
            else:
                # A checkpoint's evaluation that a resumed run has made once more.
                others = (one for one in run.evaluations if one["step"] != log["step"] or one.keys() != log.keys())
                run.evaluations = [*others, log]
        case "program":
            run.programs.append({**entry, "at": at})
            session.compilations += 1
        case "cause":
            names = ("step", "kind", "shape", "seconds")
            same = [program for program in run.programs if all(program[name] == entry[name] for name in names)]
            for program in same[-1:]:
                # Records of earlier versions have no advice.
                program |= {"cause": entry["cause"], "advice": entry.get("advice")}
        case "samples":
            # Before a resume the model has answered, too. What it says in the end is the last.
            earlier = {row["prompt"]: {key: row[key] for key in row if key != "after"} for row in run.samples}
            run.samples = [{**earlier.get(row["prompt"], {}), **row} for row in entry["rows"]]
        case "error":
            # What was compiled is of the step that has failed.
            session.error, session.last_step = entry["error"], entry["step"]
        case "save":
            # A checkpoint: only the totals matter.
            pass
        case "end":
            session.end = entry
        case event:
            raise ValueError(event)
