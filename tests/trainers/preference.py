"""Trainings with preferences by upstream's trainers on eager CPU and by this package's on XLA, and what is compared."""

import copy
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from test_counts import CountPerStep, counted_alone, on_torch_tpu
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from hf_tpu_ext import (
    TPUDPOConfig,
    TPUDPOTrainer,
    TPUKTOConfig,
    TPUKTOTrainer,
    TPURewardConfig,
    TPURewardTrainer,
)
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers import ExtensionArguments


STEPS, ROWS, EVAL_EVERY = 20, 22, 6
# It compiles in half the time.
ONE_LAYER = {"num_hidden_layers": 1}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
STOCK = {
    "dpo": (DPOTrainer, DPOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "kto": (KTOTrainer, KTOConfig),
}
OURS = {
    "dpo": (TPUDPOTrainer, TPUDPOConfig),
    "reward": (TPURewardTrainer, TPURewardConfig),
    "kto": (TPUKTOTrainer, TPUKTOConfig),
}
DEFAULTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    # Two, for a step without a log to read nothing.
    "logging_steps": 2,
    "learning_rate": 1e-3,
    # As long as the moments of Adam are those of one step, an element whose gradient is rounding moves as far as any other.
    "warmup_steps": 3,
    "bf16": False,
    "max_length": 48,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Case:
    """
    A training of one of the three trainers.

    Args:
        kind (`str`): `"dpo"`, `"reward"` or `"kto"`.
        settings (`dict`): Fields of the config.
        model (`str`): Family of the tiny model.
        model_config (`dict`): Fields of its configuration.
        lora (`str`, *optional*): `"new"` for a `peft_config`, `"given"` for a model that has an adapter already.
        reference (`bool`): Whether a reference model is passed, of other weights than the policy's.
        data (`str`): Form of the data.
        by_name (`bool`): Whether the trainer loads the model.
        evaluates (`bool`): Whether there is an evaluation set, of an odd number of rows.
        lora_dropout (`float`): Of the adapter.
        steps (`int`): Optimizer steps.
        kl_rows (`int`, *optional*): Rows whose completions upstream mixes for the KL term, if not those of a batch.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    model_config: dict[str, Any] = field(default_factory=dict)
    lora: str | None = None
    reference: bool = True
    data: str = "text"
    by_name: bool = False
    evaluates: bool = False
    lora_dropout: float = 0.0
    steps: int = STEPS
    kl_rows: int | None = None

    @property
    def starts_as_reference(self) -> bool:
        """Whether the rewards of the first steps are differences of equal numbers, whose sign is that of rounding."""
        return self.kind != "reward" and (self.lora == "given" or (self.lora is None and not self.reference))


# ---- Data ----


def _words(rng: random.Random, longest: int = 18) -> str:
    return "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, longest))) + "z"


def _message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rows_for(kind: str, data: str = "text", count: int = ROWS, seed: int = 0) -> Dataset:
    """Rows of preference data in one of the forms that upstream takes."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        prompt, chosen, rejected = _words(rng), _words(rng), _words(rng)
        if data == "short":
            prompt, chosen, rejected = prompt[:6], chosen[-3:], rejected[-4:]
        if data.startswith("conversation"):
            prompt, chosen, rejected = (
                _message("user", prompt[:6]),
                _message("assistant", chosen[:6]),
                _message("assistant", rejected[:8]),
            )
        row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if data.endswith("implicit"):
            row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
        elif kind == "kto" and data != "paired":
            # In "blocks", batches have rows of one kind only.
            label = index // 4 % 2 == 0 if data == "blocks" else index % 3 != 0
            row = {"prompt": prompt, "completion": chosen if label else rejected, "label": label}
        if data == "margin":
            row["margin"] = rng.random()
        rows.append(row)
    return Dataset.from_list(rows)


# ---- Models ----


@cache
def _model_dir(base: Path, family: str, **config) -> str:
    name = "-".join([family, *(f"{key}={value}" for key, value in config.items())])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = 32
    return str(make_model(base / name, family, **{**sizes, **config}))


def moved(model):
    """The model with other weights, near enough for the exponentials of some losses to be of the size of their logarithms."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def _load(case: Case, directory: str):
    if case.kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1)
        model.config.pad_token_id = AutoTokenizer.from_pretrained(directory).pad_token_id
        return model
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


# ---- Trainings ----


class _MixingRows(KTOTrainer):
    """Upstream's, on one device, with the completions mixed as in a process of several."""

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        args = copy.copy(args)
        args.per_device_train_batch_size = args.kl_rows
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)


def trainer_for(case: Case, base: Path, ours: bool, **given):
    """Make the trainer of a case, with models below the directory `base`; `given` goes to it in place of the case's."""
    cls, config_cls = (OURS if ours else STOCK)[case.kind]
    more = {"run_report": False} if ours else {"use_cpu": True}
    config = {**DEFAULTS, "output_dir": str(base / "run"), "max_steps": case.steps, **more}
    if case.evaluates:
        config |= {"eval_strategy": "steps", "eval_steps": EVAL_EVERY}
    config |= {
        key: value
        for key, value in case.settings.items()
        if ours or key not in ExtensionArguments.__dataclass_fields__
    }
    directory = _model_dir(base, case.model, **case.model_config)
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"model": directory if case.by_name else _load(case, directory)}
    task = "SEQ_CLS" if case.kind == "reward" else "CAUSAL_LM"
    lora = LoraConfig(task_type=task, lora_dropout=case.lora_dropout, **LORA)
    if case.lora == "new":
        kwargs["peft_config"] = lora
    elif case.lora == "given":
        kwargs["model"] = get_peft_model(kwargs["model"], lora)
    elif case.reference and case.kind != "reward":
        kwargs["ref_model"] = moved(_load(case, directory))
    if case.evaluates:
        kwargs["eval_dataset"] = rows_for(case.kind, case.data, 7, seed=1)
    kwargs |= {
        "train_dataset": rows_for(case.kind, case.data),
        "processing_class": AutoTokenizer.from_pretrained(directory),
        **given,
    }
    args = config_cls(**config)
    args.kl_rows = case.kl_rows
    return (_MixingRows if case.kl_rows else cls)(args=args, **kwargs)


def train(case: Case, base: Path, ours: bool):
    """Train as a case says. What the runtime did at each step is in `counted` of this package's trainer."""
    trainer = trainer_for(case, base, ours)
    if ours:
        counter = CountPerStep(trainer.backend)
        trainer.add_callback(counter)
        trainer.counted = counter.steps
    trainer.train()
    return trainer


# ---- What is compared ----


_TIMED = ("runtime", "per_second", "flos", "preparation_time", "step_time", "phase/", "mfu", "memory")


def assert_same_numbers(case: Case, ours: list[dict], stock: list[dict]) -> None:
    """Every logged number is upstream's: to 1e-5 of it, or to 1e-5, as rewards are differences of sums over tokens."""
    assert len(ours) == len(stock)
    for mine, other in zip(ours, stock, strict=True):
        for key, value in other.items():
            if any(word in key for word in _TIMED):
                continue
            if key == "rewards/accuracies" and other["step"] <= 2 and case.starts_as_reference:
                continue
            assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{key} at step {other['step']}"


def assert_compiled(case: Case, trainer) -> None:
    """A micro-step is one execution and is replayed, only logs read, and only the first steps of each shape compile."""
    counted, wanted = trainer.counted, case.settings.get("gradient_accumulation_steps", 1)
    batches, operators = len(trainer.get_train_dataloader()), on_torch_tpu(trainer.backend)
    of_epoch = [min(wanted, batches - first) for first in range(0, batches, wanted)]
    micro_steps = [of_epoch[step % len(of_epoch)] for step in range(case.steps)]
    steps, sync_every = range(1, case.steps + 1), case.settings.get("ref_model_sync_steps")
    evaluated = [2 * (case.evaluates and (step % EVAL_EVERY == 0 or step == case.steps)) for step in steps]
    synced = [bool(sync_every) and step % sync_every == 0 for step in steps]
    # With torch_tpu the reference is moved by operators.
    places = [place for place in counted_alone(trainer.backend, counted) if not (operators and synced[place])]
    assert [counted[place].executions for place in places] == [
        micro_steps[place] + evaluated[place] + synced[place] for place in places
    ]
    without_log = [counted[place].reads for place in places if place % 2 == 0]
    assert without_log == [0] * len(without_log)
    assert sum(step.fallbacks for step in counted) == 0
    # What is compiled twice has a cause.
    assert trainer.watch.recompiles == 0 and [event.cause for event in trainer.watch.events if event.cause] == []
    if operators:
        # After the first epoch, whose last batch may have a shape of its own.
        first = max(3, len(of_epoch))
        later = [place for place in range(first, case.steps) if not evaluated[place] and not synced[place]]
        assert later
        assert [counted[place].compiles for place in later] == [0] * len(later)
    else:
        assert sum(step.compiles for step in counted) <= len(trainer.watch.programs) + bool(sync_every)
    # The last step is followed by an evaluation, which is replayed where its batches have been traced twice before.
    assert counted[-1].replays == micro_steps[-1] + (evaluated[-1] if case.steps >= 2 * EVAL_EVERY else 0)
