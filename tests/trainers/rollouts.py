"""Trainings on completions by upstream's trainers on eager CPU and by this package's on XLA; completions are the test's."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from preference import _TIMED, _model_dir, _words, moved
from test_counts import CountPerStep
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from hf_tpu_ext import (
    TPUDistillationConfig,
    TPUDistillationTrainer,
    TPUGRPOConfig,
    TPUGRPOTrainer,
    TPURLOOConfig,
    TPURLOOTrainer,
)
from hf_tpu_ext.trainers import ExtensionArguments
from hf_tpu_ext.trainers.online.arguments import RolloutArguments


STEPS, ROWS, LONGEST = 8, 9, 12
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
DEFAULTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": LONGEST,
    "logging_steps": 2,
    "learning_rate": 1e-3,
    # As long as the moments of Adam are those of one step, an element whose gradient is rounding moves as far as any other.
    "warmup_steps": 3,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class FixedCompletions:
    """Completions of one token to `LONGEST`, ended and cut off ones, drawn from PyTorch's generator as samples are."""

    def _completions(self, prompts):
        rng = random.Random(int(torch.randint(2**31, ())))
        found = []
        for _ in prompts:
            length = rng.choice([1, 3, 6, LONGEST - 1, LONGEST])
            tokens = self._tokenizer("".join(rng.choice("abcdefgh") for _ in range(length)))["input_ids"]
            if length < LONGEST:
                tokens[-1] = self._tokenizer.eos_token_id
            found.append(tokens)
        return found


class _GRPOTurn(FixedCompletions):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return self._completions(prompt_ids), None


class _PlainTurn(FixedCompletions):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return self._completions(prompt_ids)


class StockGRPO(_GRPOTurn, GRPOTrainer): ...


class OurGRPO(_GRPOTurn, TPUGRPOTrainer): ...


class StockRLOO(_PlainTurn, RLOOTrainer): ...


class OurRLOO(_PlainTurn, TPURLOOTrainer): ...


class StockDistillation(_PlainTurn, DistillationTrainer): ...


class OurDistillation(_PlainTurn, TPUDistillationTrainer): ...


class StockGMPO(_GRPOTurn, GMPOTrainer): ...


class OurGMPO(_GRPOTurn, TPUGRPOTrainer, GMPOTrainer): ...


@dataclass
class OurGMPOConfig(RolloutArguments, GMPOConfig): ...


STOCK = {
    "grpo": (StockGRPO, GRPOConfig),
    "gmpo": (StockGMPO, GMPOConfig),
    "rloo": (StockRLOO, RLOOConfig),
    "distillation": (StockDistillation, DistillationConfig),
}
OURS = {
    "grpo": (OurGRPO, TPUGRPOConfig),
    "gmpo": (OurGMPO, OurGMPOConfig),
    "rloo": (OurRLOO, TPURLOOConfig),
    "distillation": (OurDistillation, TPUDistillationConfig),
}
# Those whose model writes its completions itself, to be put in the place of the others.
WRITING = {
    "grpo": (TPUGRPOTrainer, TPUGRPOConfig),
    "rloo": (TPURLOOTrainer, TPURLOOConfig),
    "distillation": (TPUDistillationTrainer, TPUDistillationConfig),
}


# ---- Rewards ----


def of_length(completion_ids, **kwargs):
    return [len(tokens) / LONGEST for tokens in completion_ids]


def of_letters(completions, **kwargs):
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [None if len(text) == 1 else float(text.count("a") - text.count("b")) for text in texts]


async def asynchronous(completion_ids, log_metric, **kwargs):
    log_metric("longest", max(map(len, completion_ids)))
    return [float(tokens[0] % 3) for tokens in completion_ids]


@dataclass(frozen=True)
class Case:
    """
    A training of one of the three trainers.

    Args:
        kind (`str`): `"grpo"`, `"gmpo"`, `"rloo"` or `"distillation"`.
        settings (`dict`): Fields of the config.
        lora (`str`, *optional*): `"new"` for a `peft_config`, `"given"` for a model that has an adapter already.
        rewards (`tuple`): Reward functions; `"model"` is a reward model. Of `"distillation"`, nothing.
        conversation (`bool`): Whether prompts are messages.
        evaluates (`bool`): Whether there is an evaluation set.
        model (`str`): Family of the tiny model.
        model_config (`dict`): Fields of its configuration.
        steps (`int`): Optimizer steps.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: str | None = None
    rewards: tuple = (of_length, of_letters)
    conversation: bool = False
    evaluates: bool = False
    model: str = "qwen3"
    model_config: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS


def prompts_for(case: Case, count: int = ROWS, seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    prompts = [_words(rng, 10) for _ in range(count)]
    if case.conversation:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return Dataset.from_dict({"prompt": prompts, "number": list(range(count))})


def trainer_for(case: Case, base: Path, ours: bool, **given):
    """Make the trainer of a case, with models below the directory `base`; `given` goes to it in place of the case's."""
    cls, config_cls = (OURS if ours else STOCK)[case.kind]
    config = {**DEFAULTS, "output_dir": str(base / "run"), "max_steps": case.steps}
    if not ours:
        config["use_cpu"] = True
    elif issubclass(config_cls, ExtensionArguments):
        config["run_report"] = False
    if case.evaluates:
        config |= {"eval_strategy": "steps", "eval_steps": 3}
    of_package = {*ExtensionArguments.__dataclass_fields__, "max_prompt_length", "share_prompts"}
    config |= {key: value for key, value in case.settings.items() if ours or key not in of_package}
    directory = _model_dir(base, case.model, **case.model_config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rewards, more = [], {}
    if case.kind == "distillation":
        del config["num_generations"]
        torch.manual_seed(1)
        more["teacher_model"] = moved(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    for reward in case.rewards:
        if reward == "model":
            reward = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1)
        rewards.append(reward)
    lora = LoraConfig(task_type="CAUSAL_LM", **LORA)
    if case.lora == "new":
        more["peft_config"] = lora
    elif case.lora == "given":
        model = get_peft_model(model, lora)
    elif config.get("beta") and case.kind != "distillation":
        # The reference is loaded from where the policy came from.
        model = moved(model)
    if case.evaluates:
        more["eval_dataset"] = prompts_for(case, 3, seed=1)
    more |= {
        "train_dataset": prompts_for(case),
        "processing_class": AutoTokenizer.from_pretrained(directory, padding_side="left"),
        **given,
    }
    if case.kind != "distillation":
        more = {"reward_funcs": rewards, **more}
    return cls(args=config_cls(**config), **{"model": model, **more})


def train(case: Case, base: Path, ours: bool, **given):
    """Train as a case says. What the runtime did at each step is in `counted` of this package's trainer."""
    trainer = trainer_for(case, base, ours, **given)
    if ours:
        counter = CountPerStep(trainer.backend)
        trainer.add_callback(counter)
        trainer.counted = counter.steps
    trainer.train()
    return trainer


def assert_same_numbers(ours: list[dict], stock: list[dict]) -> None:
    """Every logged number is upstream's, to 1e-5 of it, or to 1e-5."""
    assert len(ours) == len(stock)
    for mine, other in zip(ours, stock, strict=True):
        for key, value in other.items():
            if any(word in key for word in _TIMED):
                continue
            if value is None:
                assert mine[key] is None, f"{key} at step {other['step']}"
                continue
            assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{key} at step {other['step']}"


def assert_written(trainer, passes: int, longest: int = LONGEST) -> None:
    """
    The programs of a step that writes its completions: a prefill, a decode, the step and its passes, replayed, one read for the
    text and one for each further pass. Where no loop is a part of a program, a token is one, and operators ask once in a while
    whether all rows have ended.
    """
    counted, in_programs = trainer.counted, trainer.backend.loops.in_programs
    programs = passes + (2 if in_programs else longest)
    places = range(len(counted))
    if in_programs:
        assert {step.replays for step in counted[4:]} == {programs}
    else:
        # Upstream changes the model in the first step and with the first checkpoint: what is traced again runs operators.
        places = [place for place in places if counted[place].replays == programs]
        assert len(places) >= len(counted) - 3
    more = {place: counted[place].executions - programs for place in places}
    assert set(more.values()) <= ({0} if in_programs else set(range(7))), more
    without_log = [counted[place].reads for place in places if place and place % 2 == 0]
    assert without_log == [passes] * len(without_log) != []
