"""What every contender trains, and how it is measured. Needs only Python, since not every contender has torch."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """
    What every contender trains, and which of its steps are measured.

    The first `logging_steps` steps are warm-up; executions and reads of the next ones, up to their log, are counted; those
    that follow are timed in windows.

    Args:
        directory (`Path`):
            Directory with the model in `model`, the rows in `rows.json`, and a log of each contender.
        max_length (`int`):
            Length of every row where rows are padded to a fixed length.
        batch_size (`int`):
            Rows of a batch.
        logging_steps (`int`):
            Steps between two logs.
        window (`int`):
            Steps that are timed together, logs included.
        repeats (`int`):
            Number of windows.
        learning_rate (`float`, *optional*, defaults to `0.001`):
            Learning rate, to which it rises from 0 in the first `logging_steps` steps.
        lora (`bool`, *optional*, defaults to `False`):
            Whether LoRA adapters of rank 8 on all linear layers are trained instead of the weights.
    """

    directory: Path
    max_length: int
    batch_size: int
    logging_steps: int
    window: int
    repeats: int
    learning_rate: float = 1e-3
    lora: bool = False

    @property
    def model_dir(self) -> Path:
        """Directory of the model and its tokenizer."""
        return self.directory / "model"

    @property
    def rows(self) -> list[dict[str, list[int]]]:
        """The training data, in the order in which it is trained on: `input_ids` of each row."""
        return json.loads((self.directory / "rows.json").read_text(encoding="utf-8"))

    @property
    def edges(self) -> list[int]:
        """The steps at which the timed windows begin and end."""
        return [2 * self.logging_steps + index * self.window for index in range(self.repeats + 1)]

    @property
    def total_steps(self) -> int:
        """Steps to train: one more than are timed, since a window ends where the next step begins."""
        return self.edges[-1] + 1


def _host_seconds() -> float:
    """CPU time of the threads that run Python: the loop's, and autograd's, which traces the backward pass."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text(encoding="utf-8")
        if task.name == str(threading.main_thread().native_id) or name.startswith("pt_autograd"):
            total += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
    return total / 1e9


class Meter:
    """
    Measures a training loop at its step boundaries. It starts each window only when told to, so that the windows of
    several processes can take turns.

    Args:
        plan ([`Plan`]):
            Which steps are measured.
        connection (`Connection`):
            Where results go to and permission comes from.
        count (`Callable[[], dict[str, int]]`):
            Counts the process's `"compiles"`, `"executions"` and `"reads"` from the device.
        wait (`Callable[[], Any]`):
            Waits for the device.
    """

    def __init__(
        self, plan: Plan, connection: Connection, count: Callable[[], dict[str, int]], wait: Callable[[], Any]
    ):
        self._plan = plan
        self._connection = connection
        self._count = count
        self._wait = wait

    @staticmethod
    def _clocks() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), _host_seconds()

    def step_begins(self, step: int) -> None:
        """Note that a step begins."""
        plan = self._plan
        counting = range(plan.logging_steps, 2 * plan.logging_steps - 1)
        if step not in (counting.start, counting.stop, *plan.edges):
            return
        # Programs run behind the loop; without this, what was counted and timed would be off by those still running.
        self._wait()
        if step == counting.start:
            self._before = self._count()
        if step == counting.stop:
            counts = self._count()
            self._connection.send({name: (counts[name] - self._before[name]) / len(counting) for name in counts})
        if step in plan.edges[1:]:
            wall, cpu, host = (now - then for now, then in zip(self._clocks(), self._started, strict=True))
            self._connection.send(
                {
                    "steps_per_second": plan.window / wall,
                    "cpu_seconds_per_step": cpu / plan.window,
                    "host_seconds_per_step": host / plan.window,
                }
            )
        if step in plan.edges[:-1]:
            self._connection.recv()
            self._started = self._clocks()

    def finish(self, losses: dict[int, float], versions: str) -> None:
        """Report what is known at the end."""
        self._connection.send({"programs": self._count()["compiles"], "losses": losses, "versions": versions})
