"""Runs work in a process of its own, which may crash or hang without taking the doctor along."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from .check import Check
from .machine import explain_end


@dataclass
class WatchedProcess:
    """
    A process that works through `names` in this order, and is ended after `patience` seconds without a new line.

    Its command gets more arguments: a directory for itself, and a file to which it adds a line of JSON for each name that
    it has finished, with `name`, `status`, `text` and, if it failed, `fix`.

    Args:
        command (`Sequence[str]`):
            The program and its first arguments.
        names (`Sequence[str]`):
            What it works through.
        patience (`float`):
            Seconds.
        fixes (`Mapping[str, str]`, *optional*):
            What to do where a name ends in a crash or hangs. By default as the end of the process suggests.
        goes_on (`bool`, *optional*, defaults to `False`):
            Whether a new process goes on with the names that are left after one has failed. The command then gets these
            names as arguments, too.
        directory (`Path`, *optional*):
            The directory. By default a temporary one for each call of [`~WatchedProcess.run`].
        ends (`float`, *optional*):
            The time on the clock of `time.monotonic` after which nothing new is begun.
    """

    command: Sequence[str]
    names: Sequence[str]
    patience: float
    fixes: Mapping[str, str] = field(default_factory=dict)
    goes_on: bool = False
    directory: Path | None = None
    ends: float = float("inf")

    def __post_init__(self):
        #: All that the process wrote, where it failed.
        self.output = ""

    def run(self) -> Iterator[Check]:
        """Start the process. Yields a check for each name, as soon as it is known."""
        with (
            TemporaryDirectory(prefix="hf_tpu_doctor_")
            if self.directory is None
            else nullcontext(self.directory) as directory
        ):
            names = list(self.names)
            while names:
                for check in self._run_once(Path(directory), names):
                    names.pop(0)
                    yield check
                if not self.goes_on:
                    return

    def _run_once(self, directory: Path, names: Sequence[str]) -> Iterator[Check]:
        ticks, log = directory / "ticks.jsonl", directory / "output.txt"
        ticks.write_text("")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self.command, str(directory), str(ticks), *(names if self.goes_on else ())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        try:
            yield from self._watch(process, ticks, log, list(names))
        finally:
            if process.poll() is None:
                # Its workers, too.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _watch(self, process: subprocess.Popen, ticks: Path, log: Path, names: Sequence[str]) -> Iterator[Check]:
        for number, name in enumerate(names):
            deadline = min(time.monotonic() + self.patience, self.ends)
            while True:
                # In this order: it may tick and end in between.
                has_ended, hung = process.poll() is not None, time.monotonic() > deadline
                lines = ticks.read_text(encoding="utf-8").split("\n")[:-1]
                if len(lines) > number or has_ended or hung:
                    break
                time.sleep(0.05)
            output = log.read_text(encoding="utf-8", errors="replace")
            if len(lines) > number:
                check = Check(**json.loads(lines[number]))
            else:
                text = f"nothing happened for {self.patience:.0f} s"
                fix = "Try again: a machine that is busy is slow, and a TPU that another process holds makes it wait"
                if deadline == self.ends:
                    text = "the time was over"
                if has_ended:
                    text, fix = explain_end(process.returncode, output)
                check = Check(name, "failed", text, self.fixes.get(name, fix))
            if check.status == "failed":
                self.output += output
                yield check
                return
            yield check
