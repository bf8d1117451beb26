"""`class T(TPUTrainerMixin, X): ...` and nothing else trains with TRL's reward, DPO and KTO trainers."""

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_counts import CountPerStep, on_torch_tpu
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl.experimental import bema_for_ref_model

from hf_tpu_ext import TPUDPOConfig, TPUDPOTrainer
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers import TPUTrainerMixin
from hf_tpu_ext.trainers.checks.upstream import default_arguments, upstream_of


STEPS = 10


class Reward(TPUTrainerMixin, RewardTrainer): ...


class DPO(TPUTrainerMixin, DPOTrainer): ...


class KTO(TPUTrainerMixin, KTOTrainer): ...


class ShowsReference(TPUTrainerMixin, bema_for_ref_model.DPOTrainer): ...


def texts(count, seed):
    rng = random.Random(seed)
    return ["".join(rng.choice("abcdefgh ") for _ in range(rng.randint(2, 20))) for _ in range(count)]


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory):
    """Directory of another model: a policy that is the reference has rewards of exactly 0, which rounding decides about."""
    return make_model(
        tmp_path_factory.mktemp("reference"), hidden_size=32, intermediate_size=48, num_hidden_layers=2, seed=3
    )


@pytest.fixture
def train(xla, runs, reference_model):
    def train(cls, config_cls, lora=False, **config):
        torch.manual_seed(0)
        rows = {"prompt": texts(22, 0), "chosen": texts(22, 1), "rejected": texts(22, 2)}
        of_model, load, more = {}, AutoModelForCausalLM, {}
        if issubclass(config_cls, RewardConfig):
            load, of_model = AutoModelForSequenceClassification, {"num_labels": 1}
        elif not lora:
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(reference_model, dtype=torch.float32)
        if issubclass(config_cls, KTOConfig):
            labels = [index % 3 != 0 for index in range(22)]
            rows = {"prompt": rows["prompt"], "completion": rows["chosen"], "label": labels}
        if lora:
            more["peft_config"] = LoraConfig(
                task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False
            )
        model = load.from_pretrained(runs.model_dir, dtype=torch.float32, **of_model)
        model.config.pad_token_id = runs.tokenizer.pad_token_id
        trainer = cls(
            model=model,
            args=runs.config(config_cls, **{"warmup_steps": 0, "max_steps": STEPS, "logging_steps": 2, **config}),
            train_dataset=Dataset.from_dict(rows),
            processing_class=runs.tokenizer,
            **more,
        )
        if cls is not upstream_of(cls):
            trainer.add_callback(CountPerStep(trainer.backend))
        trainer.train()
        return trainer

    return train


@pytest.mark.parametrize(
    "ours, stock, config_cls, settings",
    [
        pytest.param(
            Reward, RewardTrainer, RewardConfig, {"center_rewards_coefficient": 0.01}, marks=pytest.mark.slow
        ),
        (DPO, DPOTrainer, DPOConfig, {}),
        pytest.param(
            DPO,
            DPOTrainer,
            DPOConfig,
            {"lora": True, "gradient_accumulation_steps": 2, "loss_type": ["sigmoid", "sft"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(KTO, KTOTrainer, KTOConfig, {}, marks=pytest.mark.slow),
    ],
    ids=["reward", "dpo", "dpo-lora-accumulated", "kto"],
)
def test_two_lines(train, runs, config_cls, ours, stock, settings):
    """Every logged number is upstream's, a micro-step is one execution and is replayed, and only logs read."""
    reference = train(stock, config_cls, use_cpu=True, **settings)
    trainer = train(ours, config_cls, **settings)
    logs = [(mine, other) for mine, other in zip(trainer.state.log_history, reference.state.log_history, strict=True)]
    names = set()
    for mine, other in logs[:-1]:
        for key, value in other.items():
            # Rewards are differences of sums over tokens, which float32 holds to 1e-5.
            assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{key} at step {other['step']}"
            names.add(key)
    assert {"reward": "margin", "dpo": "rewards/margins", "kto": "kl"}[config_cls.__name__.lower()[:-6]] in names
    assert trainer.watch.recompiles == 0
    if on_torch_tpu(trainer.backend):
        # Here by operators; `test_preference_options.py` counts whole steps.
        return
    micro_steps = settings.get("gradient_accumulation_steps", 1)
    counted = trainer.pop_callback(CountPerStep).steps
    assert [step.executions for step in counted] == [micro_steps] * STEPS
    # Every second step ends with a log.
    assert [step.reads for step in counted[::2]] == [0] * (STEPS // 2)
    assert [step.fallbacks for step in counted] == [0] * STEPS
    # Each kind of step is traced twice for each of two shapes: the last batch of an epoch has two rows or pairs.
    assert sum(step.replays for step in counted) >= STEPS * micro_steps - 8 and counted[-1].replays == micro_steps
    assert sum(step.compiles for step in counted) <= 2 * micro_steps


@pytest.mark.ci
def test_length_buckets(train):
    """The trainer of this package's with its own config: short pairs take a short graph, and every number is upstream's."""
    settings = {"max_steps": 6, "max_length": 48}
    trainer = train(TPUDPOTrainer, TPUDPOConfig, length_buckets=[32, 48], **settings)
    reference = train(DPOTrainer, DPOConfig, use_cpu=True, **settings)
    assert {shape[1] for kind, shape in trainer.watch.programs if kind == "training step"} == {32, 48}
    for mine, other in zip(trainer.state.log_history[:-1], reference.state.log_history[:-1], strict=True):
        assert {key: mine[key] for key in other} == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_trainers_that_generate_are_refused_by_name(xla, runs):
    class GRPO(TPUTrainerMixin, GRPOTrainer): ...

    with pytest.raises(
        ValueError, match="GRPOTrainer generates text within a training step.*Use hf_tpu_ext.TPUGRPOTrainer"
    ):
        GRPO("no/such-model", reward_funcs=len, args=GRPOConfig(str(runs.output_dir), use_vllm=True, bf16=False))


def test_images_are_refused_before_a_model_is_loaded(xla, runs):
    """By trainers of which upstream's have no collator for them."""
    dataset = Dataset.from_dict({"prompt": ["a"], "images": [["b"]]})
    with pytest.raises(ValueError, match=r"train_dataset has a column 'images'.*backend='cuda'"):
        Reward("no/such-model", args=runs.config(RewardConfig), train_dataset=dataset)


@pytest.mark.parametrize("cls, name", [(Reward, "Reward"), (DPO, "DPO"), (KTO, "KTO"), (ShowsReference, "DPO")])
def test_default_arguments_are_upstreams(cls, name):
    args = default_arguments(cls, "org/model")
    assert (type(args).__name__, args.output_dir) == (f"{name}Config", f"model-{name}")
