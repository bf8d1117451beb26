"""What is compared. Each contender runs in a process of its own."""

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import bare_loop
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from transformers import TrainerCallback


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
    """

    directory: Path
    max_length: int
    batch_size: int
    logging_steps: int
    window: int
    repeats: int

    @property
    def edges(self) -> list[int]:
        """The steps at which the timed windows begin and end."""
        return [2 * self.logging_steps + index * self.window for index in range(self.repeats + 1)]

    @property
    def total_steps(self) -> int:
        """Steps to train: one more than are timed, since a window ends where the next step begins."""
        return self.edges[-1] + 1


class Meter:
    """
    Measures a training loop at its step boundaries. It starts each window only when told to, so that the windows of
    several processes can take turns.

    Args:
        plan ([`Plan`]):
            Which steps are measured.
        connection (`Connection`):
            Where results go to and permission comes from.
    """

    def __init__(self, plan: Plan, connection: Connection):
        self._plan = plan
        self._connection = connection

    @staticmethod
    def _counts() -> dict[str, int]:
        names = {"compiles": "CompileTime", "executions": "ExecuteTime", "reads": "TransferFromDeviceTime"}
        return {name: (met.metric_data(metric) or (0,))[0] for name, metric in names.items()}

    def step_begins(self, step: int) -> None:
        """
        Note that a step begins.

        Args:
            step (`int`):
                Number of steps done.
        """
        plan = self._plan
        counting = range(plan.logging_steps, 2 * plan.logging_steps - 1)
        if step not in (counting.start, counting.stop, *plan.edges):
            return
        # Programs run behind the loop; without this, what was counted and timed would be off by those still running.
        xm.wait_device_ops()
        if step == counting.start:
            self._before = self._counts()
        if step == counting.stop:
            counts = self._counts()
            self._connection.send({name: (counts[name] - self._before[name]) / len(counting) for name in counts})
        if step in plan.edges[1:]:
            wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
            self._connection.send({"steps_per_second": plan.window / wall, "cpu_seconds_per_step": cpu / plan.window})
        if step in plan.edges[:-1]:
            self._connection.recv()
            self._started = time.perf_counter(), time.process_time()

    def finish(self, losses: dict[int, float]) -> None:
        """
        Report what is known at the end.

        Args:
            losses (`dict[int, float]`):
                Mean loss of each `logging_steps` steps, by the last of them.
        """
        self._connection.send({"programs": self._counts()["compiles"], "losses": losses})


class _MeterCallback(TrainerCallback):
    def __init__(self, meter: Meter):
        self._meter = meter

    def on_step_begin(self, args, state, control, **kwargs):
        self._meter.step_begins(state.global_step)


LEARNING_RATE = 1e-3


def _train_with(trainer_class, plan: Plan, meter: Meter, **config) -> dict[int, float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig

    model_dir = plan.directory / "model"
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(model_dir),
        args=SFTConfig(
            output_dir=plan.directory / "output",
            max_length=plan.max_length,
            per_device_train_batch_size=plan.batch_size,
            max_steps=plan.total_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=plan.logging_steps,
            logging_steps=plan.logging_steps,
            train_sampling_strategy="sequential",
            bf16=False,
            optim="adamw_torch",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            **config,
        ),
        train_dataset=Dataset.from_list(json.loads((plan.directory / "rows.json").read_text(encoding="utf-8"))),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    trainer.add_callback(_MeterCallback(meter))
    trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def _stock(plan: Plan, meter: Meter) -> dict[int, float]:
    from trl import SFTTrainer

    return _train_with(SFTTrainer, plan, meter)


def _stock_padded(plan: Plan, meter: Meter) -> dict[int, float]:
    from trl import SFTTrainer

    return _train_with(SFTTrainer, plan, meter, pad_to_multiple_of=plan.max_length)


def _ours(plan: Plan, meter: Meter) -> dict[int, float]:
    from hf_tpu_ext import TPUSFTTrainer

    return _train_with(TPUSFTTrainer, plan, meter)


def _bare(plan: Plan, meter: Meter) -> dict[int, float]:
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model_dir = plan.directory / "model"
    collate = DataCollatorForLanguageModeling(
        AutoTokenizer.from_pretrained(model_dir).pad_token_id, pad_to_multiple_of=plan.max_length
    )
    rows = itertools.cycle(json.loads((plan.directory / "rows.json").read_text(encoding="utf-8")))
    batches = (collate(list(itertools.islice(rows, plan.batch_size))) for _ in itertools.count())
    return bare_loop.train(
        model_dir,
        batches,
        total_steps=plan.total_steps,
        logging_steps=plan.logging_steps,
        lr=LEARNING_RATE,
        warmup_steps=plan.logging_steps,
        on_step_begin=meter.step_begins,
    )


CONTENDERS: dict[str, Callable[[Plan, Meter], dict[int, float]]] = {
    "bare": _bare,
    "ours": _ours,
    "stock_padded": _stock_padded,
    "stock": _stock,
}


def run(name: str, plan: Plan, connection: Connection) -> None:
    """
    Run one contender in this process.

    Args:
        name (`str`):
            One of [`CONTENDERS`].
        plan ([`Plan`]):
            What to train and to measure.
        connection (`Connection`):
            As in [`Meter`].
    """
    log = os.open(plan.directory / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    meter = Meter(plan, connection)
    meter.finish(CONTENDERS[name](plan, meter))
