"""What is compared. Each contender runs in a process of its own, since upstream chooses its device at import."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import bare_loop
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


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
    """

    def __init__(self, plan: Plan, connection: Connection):
        self._plan = plan
        self._connection = connection

    @staticmethod
    def _counts() -> dict[str, int]:
        names = {"compiles": "CompileTime", "executions": "ExecuteTime", "reads": "TransferFromDeviceTime"}
        return {name: (met.metric_data(metric) or (0,))[0] for name, metric in names.items()}

    @staticmethod
    def _clocks() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), _host_seconds()

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


def _train_with(
    trainer_class: type[Trainer], plan: Plan, meter: Meter, config_class: type[SFTConfig] = SFTConfig, **config
) -> dict[int, float]:
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(plan.model_dir),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if plan.lora else None,
        args=config_class(
            output_dir=plan.directory / "output",
            max_length=plan.max_length,
            per_device_train_batch_size=plan.batch_size,
            max_steps=plan.total_steps,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=plan.logging_steps,
            logging_steps=plan.logging_steps,
            train_sampling_strategy="sequential",
            # These three are TRL's defaults that crash on torch_xla.
            bf16=False,
            optim="adamw_torch",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            **config,
        ),
        train_dataset=Dataset.from_list(plan.rows),
        processing_class=AutoTokenizer.from_pretrained(plan.model_dir),
    )
    trainer.add_callback(_MeterCallback(meter))
    trainer.train()
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def _stock(plan: Plan, meter: Meter) -> dict[int, float]:
    return _train_with(SFTTrainer, plan, meter)


def _stock_padded(plan: Plan, meter: Meter) -> dict[int, float]:
    return _train_with(SFTTrainer, plan, meter, pad_to_multiple_of=plan.max_length)


def _ours(plan: Plan, meter: Meter) -> dict[int, float]:
    # Importing it switches upstream's XLA branches off, which the stock trainer needs.
    from hf_tpu_ext import TPUSFTTrainer

    return _train_with(TPUSFTTrainer, plan, meter)


def _traced(plan: Plan, meter: Meter) -> dict[int, float]:
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    return _train_with(TPUSFTTrainer, plan, meter, TPUSFTConfig, step_replay=False)


def _bare(plan: Plan, meter: Meter) -> dict[int, float]:
    pad_token_id = AutoTokenizer.from_pretrained(plan.model_dir).pad_token_id
    collate = DataCollatorForLanguageModeling(pad_token_id, pad_to_multiple_of=plan.max_length)
    rows = itertools.cycle(plan.rows)
    return bare_loop.train(
        plan.model_dir,
        batches=(collate(list(itertools.islice(rows, plan.batch_size))) for _ in itertools.count()),
        total_steps=plan.total_steps,
        logging_steps=plan.logging_steps,
        learning_rate=plan.learning_rate,
        warmup_steps=plan.logging_steps,
        on_step_begin=meter.step_begins,
    )


@dataclass(frozen=True)
class Contender:
    """
    One way to train.

    Args:
        title (`str`):
            Name for people, in Markdown.
        train (`Callable`):
            Trains a [`Plan`] under a [`Meter`] and returns the mean loss of each `logging_steps` steps, by the last.
        one_window (`bool`, *optional*, defaults to `False`):
            Whether only `logging_steps` steps are timed, once.
    """

    title: str
    train: Callable[[Plan, Meter], dict[int, float]]
    one_window: bool = False

    def adapt(self, plan: Plan) -> Plan:
        """
        Shorten a plan to what this contender is timed for.

        Args:
            plan ([`Plan`]):
                The common plan.

        Returns:
            [`Plan`]: Its own.
        """
        return replace(plan, window=plan.logging_steps, repeats=1) if self.one_window else plan


CONTENDERS = {
    "bare": Contender("bare torch_xla loop", _bare),
    "ours": Contender("`TPUSFTTrainer`", _ours),
    "traced": Contender("`TPUSFTTrainer`, `step_replay=False`", _traced),
    "stock_padded": Contender("`trl.SFTTrainer`, padded to a fixed length", _stock_padded),
    # It compiles at nearly every step, for minutes in all.
    "stock": Contender("`trl.SFTTrainer`", _stock, one_window=True),
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
    meter.finish(CONTENDERS[name].train(plan, meter))
