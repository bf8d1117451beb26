"""Trainers of `trl.experimental` whose loss is a function of a batch train with the mixin before them, and nothing else."""

import pytest
import torch
from datasets import Dataset
from test_counts import CountPerStep
from test_two_lines import STEPS, texts
from transformers import AutoModelForCausalLM
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

from hf_tpu_ext.trainers import TPUTrainerMixin


class CPO(TPUTrainerMixin, CPOTrainer): ...


class ORPO(TPUTrainerMixin, ORPOTrainer): ...


class TPO(TPUTrainerMixin, TPOTrainer): ...


SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0}


@pytest.fixture
def train_pairs(xla, runs):
    def train(cls, config_cls, **config):
        torch.manual_seed(0)
        rows = {"prompt": texts(22, 0), "chosen": texts(22, 1), "rejected": texts(22, 2)}
        if config_cls is TPOConfig:
            rows["reference"] = texts(22, 3)
        dataset = Dataset.from_dict(rows)
        settings = {"warmup_steps": 0, "max_steps": STEPS, "logging_steps": 2, "eval_strategy": "steps", **config}
        trainer = cls(
            model=AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32),
            args=runs.config(config_cls, eval_steps=STEPS, **settings),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(6)),
            processing_class=runs.tokenizer,
        )
        if issubclass(cls, TPUTrainerMixin):
            trainer.add_callback(CountPerStep(trainer.backend))
        trainer.train()
        return trainer

    return train


def compared(trainer, reference, padded_logits):
    """Compare every logged number; returns the names."""
    names = set()
    for mine, other in list(zip(trainer.state.log_history, reference.state.log_history, strict=True))[:-1]:
        for key, value in other.items():
            # Upstream takes the mean of CPO's and ORPO's logits over padding, too, of which there is another amount.
            if not key.endswith(("_runtime", "_per_second")) and not (padded_logits and "logits/" in key):
                # Rewards are differences of sums over tokens, which float32 holds to 1e-5.
                assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{key} at step {other['step']}"
                names.add(key)
    return names


@pytest.mark.parametrize(
    "ours, stock, config_cls, settings, metric",
    [
        pytest.param(CPO, CPOTrainer, CPOConfig, {}, "nll_loss", id="cpo", marks=pytest.mark.slow),
        pytest.param(CPO, CPOTrainer, CPOConfig, SIMPO, "rewards/margins", id="simpo", marks=pytest.mark.slow),
        pytest.param(ORPO, ORPOTrainer, ORPOConfig, {}, "log_odds_ratio", id="orpo", marks=pytest.mark.slow),
        pytest.param(TPO, TPOTrainer, TPOConfig, {}, "rewards/margins", id="tpo", marks=pytest.mark.slow),
    ],
)
def test_pairs(train_pairs, ours, stock, config_cls, settings, metric):
    """Every logged number is upstream's, training and evaluation are one execution a batch, and only logs read."""
    reference = train_pairs(stock, config_cls, use_cpu=True, **settings)
    trainer = train_pairs(ours, config_cls, **settings)
    assert {metric, f"eval_{metric}"} <= compared(trainer, reference, padded_logits=config_cls is not TPOConfig)
    counted = trainer.pop_callback(CountPerStep).steps
    # After the last step come two batches of an evaluation.
    assert [step.executions for step in counted] == [1] * (STEPS - 1) + [3]
    assert [step.reads for step in counted[::2]] == [0] * (STEPS // 2)
    assert [step.fallbacks for step in counted] == [0] * STEPS
    # The last batch of an epoch has two pairs, and so has that of an evaluation.
    assert counted[-2].replays == 1 and sum(step.compiles for step in counted) == 4
    assert trainer.watch.recompiles == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours, stock, config_cls", [(CPO, CPOTrainer, CPOConfig), (ORPO, ORPOTrainer, ORPOConfig)], ids=["cpo", "orpo"]
)
def test_accumulation(train_pairs, ours, stock, config_cls):
    """
    In the last step of an epoch accelerate cuts the metrics of all micro-steps to the rows of the last batch, here 2 of 4. The
    number is data of the step: its micro-steps are the programs of all others.
    """
    settings = {"gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1, "eval_strategy": "no"}
    reference = train_pairs(stock, config_cls, use_cpu=True, **settings)
    trainer = train_pairs(ours, config_cls, **settings)
    assert {"rewards/chosen", "logps/rejected"} <= compared(trainer, reference, padded_logits=True)
    # A micro-step, the last one of a step, and that with the last batch.
    assert sum(step.compiles for step in trainer.pop_callback(CountPerStep).steps) == 3
    assert trainer.watch.recompiles == 0
