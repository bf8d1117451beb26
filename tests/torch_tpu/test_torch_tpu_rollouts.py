"""Training on completions on torch_tpu: every logged number is that of upstream's trainer on eager CPU."""

from dataclasses import replace

import pytest
import rollouts
import torch
from rollouts import LONGEST, Case
from test_preference_resume import logged_after, weights_and_moments
from trl import DistillationConfig, DistillationTrainer


WHOLE = {"compile_step": "step", "gradient_checkpointing": False}
REUSED = {"num_iterations": 2, "steps_per_generation": 2}
CASES = {
    "grpo": Case("grpo", WHOLE),
    "grpo-layers": Case("grpo", {**REUSED, "beta": 0.04, "gradient_accumulation_steps": 2}, evaluates=True),
    "grpo-operators": Case("grpo", {"loss_type": "bnpo", "entropy_coef": 0.01, "compile_step": "off"}),
    "grpo-many": Case(
        "grpo",
        {
            **WHOLE,
            **REUSED,
            "loss_type": "grpo",
            "beta": 0.04,
            "delta": 1.05,
            "top_entropy_quantile": 0.4,
            "entropy_coef": 0.01,
            "mask_truncated_completions": True,
            "gradient_accumulation_steps": 2,
        },
        lora="new",
    ),
    "grpo-adaptive": Case(
        "grpo", {"use_adaptive_entropy": True, "entropy_target": 5.4, "entropy_coef_delta": 0.01, "entropy_coef": 0.02}
    ),
    "rloo": Case("rloo", {**WHOLE, **REUSED, "beta": 0.04}, evaluates=True),
    "rloo-reward-model": Case("rloo", {"steps_per_generation": 2}, rewards=("model",), lora="given", steps=4),
    "distillation": Case(
        "distillation", {"beta": 0.3, "gradient_accumulation_steps": 2}, rewards=(), evaluates=True, steps=6
    ),
}

SLOW = {"grpo-adaptive", "rloo-reward-model"}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("rollouts")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_every_number_is_upstreams(tpu, models, name):
    case = CASES[name]
    reference = rollouts.train(case, models, ours=False)
    trainer = rollouts.train(case, models, ours=True)
    rollouts.assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert trainer.model.device.type == "tpu"
    assert trainer.watch.recompiles == 0


# ---- What the model writes itself ----


@pytest.fixture
def writes(monkeypatch):
    for kind, own in rollouts.WRITING.items():
        monkeypatch.setitem(rollouts.OURS, kind, own)
    monkeypatch.setitem(rollouts.STOCK, "distillation", (DistillationTrainer, DistillationConfig))


def early(completion_ids, **kwargs):
    """Tokens of the first half of the vocabulary."""
    return [sum(token < 128 for token in tokens) / len(tokens) for tokens in completion_ids]


def test_greedily_the_student_writes_what_upstreams_does(tpu, models, writes):
    settings = {"top_k": 1, "max_completion_length": 6, "learning_rate": 1e-2}
    case = Case("distillation", settings, rewards=(), steps=6)
    reference = rollouts.train(case, models, ours=False)
    trainer = rollouts.train(case, models, ours=True)
    rollouts.assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert sum(step.compiles for step in trainer.counted[1:]) == 0


@pytest.mark.parametrize("settings", [WHOLE, {**REUSED, "beta": 0.04}], ids=["whole", "layers"])
def test_compiles_in_the_first_step_only(tpu, models, writes, settings):
    """Rewards rise meanwhile."""
    more = {"per_device_train_batch_size": 16, "num_generations": 8, "learning_rate": 2e-2, "warmup_steps": 0}
    more["lr_scheduler_type"] = "constant"
    torch.tpu._clear_cache()
    trainer = rollouts.train(Case("grpo", {**settings, **more}, rewards=(early,), steps=16), models, ours=True)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[-1] > rewards[0] + 0.1
    counted = trainer.counted
    assert counted[0].compiles > 0 and [step.compiles for step in counted[1:]] == [0] * 15
    assert trainer.watch.recompiles == 0
    if settings is WHOLE:
        # A program of the prompts, one of each further token, and the step; what is written is read once.
        assert {step.executions for step in counted[1:-1]} <= {LONGEST + 1 + small for small in range(7)}
        assert [step.reads for step in counted[2::2]] == [1] * 7


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_resumed_run_writes_the_same(tpu, models, writes, tmp_path, kind):
    """Also in the middle of what was written, and after what is compiled has been forgotten."""
    case = Case(kind, REUSED, evaluates=True, steps=8, rewards=(early,))
    saves = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
    whole = rollouts.trainer_for(replace(case, settings={**case.settings, **saves}), models, ours=True)
    whole.train()
    for step in (2, 4):
        torch.compiler.reset()
        resumed = rollouts.trainer_for(case, models, ours=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(whole), rtol=0, atol=0)
        assert logged_after(resumed, step) == logged_after(whole, step) != []
