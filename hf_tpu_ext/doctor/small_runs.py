"""
The small trainings of `hf-tpu doctor --full`, with the trainers of every run: on the accelerator, and the same on eager CPU.

What is looked at is what anybody sees: logs, saved weights and the runtime's counters.
"""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import load_dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

import hf_tpu_ext

from ..backends.base import Backend
from ..backends.insight import Counters
from ..examples.jsonl import write_splits
from ..examples.tiny import make_arithmetic, make_model, make_preferences, make_questions


ROWS_PER_CHIP = 4
STEPS = 8
MAX_LENGTH = 64
#: Every program has been compiled and compared after as many optimizer steps.
WARM_STEPS = 4
# The head is as wide as splash attention needs it.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
# What is tried is said: nothing here is left to what a recipe of this size would get.
_DEFAULTS = {
    "per_device_train_batch_size": ROWS_PER_CHIP,
    "per_device_eval_batch_size": ROWS_PER_CHIP,
    "max_steps": STEPS,
    "logging_steps": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "run_report": False,
    "step_replay": True,
    "scan_layers": "off",
    "attention": "slices",
}


@dataclass(frozen=True)
class SmallRun:
    """
    A small training: fields of its config on top of the defaults here; `"SFT"`, `"DPO"` or `"GRPO"`; the directory
    of its rows; whether it evaluates in the middle and at the end, and whether it trains an adapter.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    trainer: str = "SFT"
    data: str = "data"
    evaluates: bool = False
    lora: bool = False

    @property
    def micro_steps(self) -> int:
        """Batches that it trains on."""
        settings = _DEFAULTS | self.settings
        return settings["max_steps"] * settings.get("gradient_accumulation_steps", 1)


#: All of them, by name.
RUNS = {
    "plain": SmallRun(),
    "traced": SmallRun({"step_replay": False}),
    "two lengths": SmallRun(
        {"length_buckets": [32, MAX_LENGTH], "train_sampling_strategy": "sequential"}, data="lengths"
    ),
    "accumulated": SmallRun({"gradient_accumulation_steps": 2, "max_steps": 6}),
    "bfloat16": SmallRun({"bf16": True}),
    "checkpointed": SmallRun({"gradient_checkpointing": True}),
    "loop": SmallRun({"gradient_checkpointing": True, "scan_layers": "on"}),
    "splash": SmallRun({"bf16": True, "attention": "splash"}),
    "evaluated": SmallRun({"eval_strategy": "steps", "eval_steps": 3}, evaluates=True),
    "taught": SmallRun({"kd_teacher": "teacher", "kd_alpha": 0.5}),
    "preferences": SmallRun({}, "DPO", "preferences"),
    "completions": SmallRun({"num_generations": 4, "max_completion_length": 16}, "GRPO", "questions"),
    "sharded": SmallRun({"mesh": "fsdp"}),
    "killed": SmallRun({"save_strategy": "steps", "save_steps": 4}),
    "adapter": SmallRun({"save_strategy": "steps", "save_steps": 4}, lora=True),
}


@dataclass
class Outcome:
    """
    What a training came to: its logs; its weights on the host, by name; what the runtime did meanwhile, and of that what
    it did after [`WARM_STEPS`]; and the trainer.
    """

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    counters: Counters
    late: Counters
    trainer: Any

    def values(self, name: str) -> list[float]:
        """What was logged under a name."""
        return [float(entry[name]) for entry in self.logs if name in entry]


class CountSteps(TrainerCallback):
    """Counts what the runtime does in all optimizer steps, and in those after [`WARM_STEPS`]."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._at_begin = self._at_warm = Counters()
        #: What it did in all steps, and in those after the first ones.
        self.all = self.late = Counters()

    def _count(self) -> Counters:
        self._backend.wait()
        return self._backend.counters()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == WARM_STEPS:
            self._at_warm = self._count()
        elif self._at_begin == Counters():
            self._at_begin = self._count()

    def on_train_end(self, args, state, control, **kwargs):
        at_end = self._count()
        self.all, self.late = at_end - self._at_begin, at_end - self._at_warm


class _RecordsCompletions:
    """Keeps the completions that a trainer generates."""

    def _generate_single_turn(self, *args, **kwargs):
        outputs = super()._generate_single_turn(*args, **kwargs)
        self.completions.append(outputs[0])
        return outputs


class _TakesCompletions:
    """Is trained on completions that another trainer has generated."""

    def _generate_single_turn(self, *args, **kwargs):
        return self.completions.pop(0), None


def reward_tokens(completion_ids, **kwargs) -> list[float]:
    """A reward that differs between completions: their tokens, counted modulo 7."""
    return [float(sum(tokens) % 7) for tokens in completion_ids]


def make_inputs(directory: Path, chips: int) -> None:
    """Make a model, a teacher and rows for all trainings; once for a directory."""
    if (directory / "lengths").exists():
        return
    make_model(directory / "model", **_SIZES)
    make_model(directory / "teacher", seed=1, **_SIZES)
    rows = 2 * ROWS_PER_CHIP * chips
    # Rows for more than one training, in one epoch, also of two processes or one for each GPU. Every eighth is one for
    # evaluation, and the last batch of these is not full.
    make_arithmetic(directory / "data", 8 * (7 * max(chips, torch.cuda.device_count(), 2) + 1))
    make_preferences(directory / "preferences", 4 * rows)
    make_questions(directory / "questions", 4 * rows)
    rng = random.Random(0)
    # A batch of short rows, then one of long rows.
    lengths = [length for length in (20, 50) * (STEPS // 2) for _ in range(ROWS_PER_CHIP * chips)]
    texts = [{"text": "".join(rng.choices("abcdefgh", k=length))} for length in lengths]
    write_splits(directory / "lengths", {"train": texts, "test": texts[:8]})


def make_trainer(
    run: SmallRun,
    directory: Path,
    name: str,
    chips: int = 1,
    stock: bool = False,
    **changes: Any,
) -> Any:
    """
    Make the trainer of a small run, with an output directory of a `name` in that of [`make_inputs`]: of this
    package, on the accelerator, or upstream's on eager CPU (`stock`), with the rows of all `chips`. `changes` are
    more fields of its config.
    """
    settings = _DEFAULTS | run.settings | changes
    # Only this package's trainer takes a teacher: its own run on eager CPU is the reference.
    package, prefix = (trl, "") if stock and "kd_teacher" not in settings else (hf_tpu_ext, "TPU")
    config_cls, cls = (getattr(package, f"{prefix}{run.trainer}{what}") for what in ("Config", "Trainer"))
    if stock:
        settings["use_cpu"] = True
        for field_name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            settings[field_name] *= chips
    if "kd_teacher" in settings:
        settings["kd_teacher"] = str(directory / settings["kd_teacher"])
    if run.trainer != "GRPO":
        settings.setdefault("max_length", MAX_LENGTH)
    field_names = config_cls.__dataclass_fields__
    args = config_cls(str(directory / name), **{key: value for key, value in settings.items() if key in field_names})
    splits = {name: load_dataset(str(directory / run.data), split=name) for name in ("train", "test")}
    kwargs: dict[str, Any] = {"train_dataset": splits["train"]}
    if run.evaluates:
        kwargs["eval_dataset"] = splits["test"]
    if run.lora:
        # The weights that an adapter begins with are drawn.
        torch.manual_seed(0)
        kwargs["peft_config"] = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if run.trainer == "GRPO":
        kwargs["reward_funcs"] = reward_tokens
        cls = type(cls.__name__, (_TakesCompletions if stock else _RecordsCompletions, cls), {"completions": []})
    return cls(model=str(directory / "model"), args=args, **kwargs)


def finish(trainer: Any, backend: Backend, resume: str | None = None) -> Outcome:
    """Train, and gather what came of it. `backend` is that whose steps are counted."""
    steps = CountSteps(backend)
    trainer.add_callback(steps)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    # The file is that of a model or of an adapter.
    (file,) = Path(trainer.args.output_dir).glob("*model.safetensors")
    return Outcome(trainer.state.log_history, load_file(file), steps.all, steps.late, trainer)


class SmallRuns:
    """Runs small trainings on a backend, each once, with models, data and outputs in a directory."""

    def __init__(self, directory: Path, backend: Backend):
        self.directory = directory
        self.backend = backend
        make_inputs(directory, backend.num_chips)
        self.ours = cache(lambda name: finish(self.make(name), backend))
        self.reference = cache(self._reference)

    def make(self, name: str, callback: TrainerCallback | None = None) -> Any:
        """The trainer of a run on the accelerator."""
        trainer = make_trainer(RUNS[name], self.directory, f"{name}-run")
        if callback is not None:
            trainer.add_callback(callback)
        return trainer

    def _reference(self, name: str) -> Outcome:
        """Run a training by upstream's trainer on eager CPU."""
        trainer = make_trainer(RUNS[name], self.directory, f"{name}-cpu", self.backend.num_chips, stock=True)
        if RUNS[name].trainer == "GRPO":
            trainer.completions = list(self.ours(name).trainer.completions)
        return finish(trainer, self.backend)
