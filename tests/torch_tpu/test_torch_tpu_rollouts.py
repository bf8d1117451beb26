"""Training on completions on torch_tpu: every logged number is that of upstream's trainer on eager CPU."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))

import rollouts  # noqa: E402
from rollouts import Case  # noqa: E402


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
    "rloo": Case("rloo", {**WHOLE, **REUSED, "beta": 0.04}, evaluates=True),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("rollouts")


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_upstreams(tpu, models, name):
    case = CASES[name]
    reference = rollouts.train(case, models, ours=False)
    trainer = rollouts.train(case, models, ours=True)
    rollouts.assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert trainer.model.device.type == "tpu"
    assert trainer.watch.recompiles == 0
