"""Watches a small training in a process of its own, which may crash or hang without taking the doctor along."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .check import Check
from .machine import explain_end


#: What is tried, in this order.
PHASES = ("runtime", "data", "forward", "backward", "step", "gradient sync", "save", "resume", "export")
#: Seconds without a new tick after which the training is ended. A first program on a TPU may take a minute.
PATIENCE = 180
_TRAINING = (sys.executable, "-m", "hf_tpu_ext.doctor.training")
_FIXES = {
    "runtime": "A TPU that another process holds makes it wait: see the lines on the TPU above",
    "save": "Look at the room on the disk of TMPDIR",
}


@dataclass
class SmokeTest:
    """
    A small training in a process of its own, which is ended after `patience` seconds without a new tick.

    Its command gets two more arguments: a directory for itself, and a file to which it adds a line of JSON for each
    phase that it has finished, with `name`, `status`, `text` and, if it failed, `fix`.
    """

    command: Sequence[str] = _TRAINING
    patience: float = PATIENCE

    def __post_init__(self):
        #: All that it wrote, if it failed.
        self.output = ""

    def run(self) -> Iterator[Check]:
        """Train. Yields a check for each phase, as soon as it is known. After one that failed there is none."""
        with tempfile.TemporaryDirectory(prefix="hf_tpu_doctor_") as directory:
            ticks, log = Path(directory) / "ticks.jsonl", Path(directory) / "output.txt"
            ticks.touch()
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*self.command, directory, str(ticks)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"HF_HUB_OFFLINE": "1"},
                    start_new_session=True,
                )
            try:
                yield from self._watch(process, ticks, log)
            finally:
                if process.poll() is None:
                    # Its workers, too.
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _watch(self, process: subprocess.Popen, ticks: Path, log: Path) -> Iterator[Check]:
        for number, phase in enumerate(PHASES):
            deadline = time.monotonic() + self.patience
            while True:
                # In this order: it may tick and end in between.
                ended, hung = process.poll() is not None, time.monotonic() > deadline
                lines = ticks.read_text(encoding="utf-8").split("\n")[:-1]
                if len(lines) > number or ended or hung:
                    break
                time.sleep(0.05)
            output = log.read_text(encoding="utf-8", errors="replace")
            if len(lines) > number:
                check = Check(**json.loads(lines[number]))
            else:
                text, fix = f"nothing happened for {self.patience:.0f} s", "Try again; a machine that is busy is slow"
                if ended:
                    text, fix = explain_end(process.returncode, output)
                check = Check(phase, "failed", text, _FIXES.get(phase, fix))
            if check.status == "failed":
                self.output = output
                yield check
                return
            yield check
