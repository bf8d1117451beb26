"""What is compared. Each contender runs in a process of its own, since upstream chooses its device at import."""

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import bare_loop
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from datasets import Dataset
from meter import Meter, Plan
from peft import LoraConfig
from tables import versions
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


class _MeterCallback(TrainerCallback):
    def __init__(self, meter: Meter):
        self._meter = meter

    def on_step_begin(self, args, state, control, **kwargs):
        self._meter.step_begins(state.global_step)


def train_with(
    trainer_class: type[Trainer], plan: Plan, meter: Meter, config_class: type[SFTConfig] = SFTConfig, **config
) -> dict[int, float]:
    """Train with a trainer."""
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(plan.model_dir),
        peft_config=LoraConfig(r=8, target_modules="all-linear") if plan.lora else None,
        args=config_class(
            # Two runs may not write to one.
            output_dir=plan.directory / f"output-{os.getpid()}",
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
    return train_with(SFTTrainer, plan, meter)


def _stock_padded(plan: Plan, meter: Meter) -> dict[int, float]:
    return train_with(SFTTrainer, plan, meter, pad_to_multiple_of=plan.max_length)


def _ours(plan: Plan, meter: Meter) -> dict[int, float]:
    # Importing it switches upstream's XLA branches off, which the stock trainer needs.
    from hf_tpu_ext import TPUSFTTrainer

    return train_with(TPUSFTTrainer, plan, meter)


def _stacked(plan: Plan, meter: Meter) -> dict[int, float]:
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    # By default they are, without a callback that runs at every step: it may look at layers.
    return train_with(TPUSFTTrainer, plan, meter, TPUSFTConfig, scan_layers="on")


def _traced(plan: Plan, meter: Meter) -> dict[int, float]:
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    return train_with(TPUSFTTrainer, plan, meter, TPUSFTConfig, step_replay=False)


def _unwatched(plan: Plan, meter: Meter) -> dict[int, float]:
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
    from hf_tpu_ext.watch.syncs import SyncMonitor

    class Unwatched(TPUSFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.remove_callback(SyncMonitor)

    return train_with(Unwatched, plan, meter, TPUSFTConfig, step_status=False, run_report=False)


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
        train (`Callable`, *optional*):
            Trains a [`Plan`] under a [`Meter`] and returns the mean loss of each `logging_steps` steps, by the last. Not
            needed where `script` is another one.
        one_window (`bool`, *optional*, defaults to `False`):
            Whether only `logging_steps` steps are timed, once.
        script (`Path`, *optional*):
            What its process is to run, by default this file. It gets the descriptor of a connection, over which the plan
            comes.
    """

    title: str
    train: Callable[[Plan, Meter], dict[int, float]] | None = None
    one_window: bool = False
    script: Path = Path(__file__)

    def adapt(self, plan: Plan) -> Plan:
        """Shorten a plan to what this contender is timed for."""
        return replace(plan, window=plan.logging_steps, repeats=1) if self.one_window else plan


CONTENDERS = {
    "bare": Contender("bare torch_xla loop", _bare),
    "jax": Contender("bare JAX loop, Optax", script=Path(__file__).with_name("jax_loop.py")),
    "stacked": Contender("`TPUSFTTrainer`, stacked layers", _stacked),
    "ours": Contender("`TPUSFTTrainer`, separate layers", _ours),
    "traced": Contender("`TPUSFTTrainer`, separate layers, `step_replay=False`", _traced),
    "unwatched": Contender("`TPUSFTTrainer`, nothing watched", _unwatched),
    "stock_padded": Contender("`trl.SFTTrainer`, padded to a fixed length", _stock_padded),
    # It compiles at nearly every step, for minutes in all.
    "stock": Contender("`trl.SFTTrainer`", _stock, one_window=True),
}


def count() -> dict[str, int]:
    """What torch_xla has done in this process, as [`Meter`] takes it."""
    names = {"compiles": "CompileTime", "executions": "ExecuteTime", "reads": "TransferFromDeviceTime"}
    return {name: (met.metric_data(metric) or (0,))[0] for name, metric in names.items()}


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        plan = connection.recv()
        meter = Meter(plan, connection, count, xm.wait_device_ops)
        meter.finish(CONTENDERS[sys.argv[2]].train(plan, meter), versions())
