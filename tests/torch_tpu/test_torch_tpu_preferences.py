"""Preference trainers on torch_tpu: every logged number is that of upstream's trainer on eager CPU."""

from dataclasses import replace

import preference
import pytest
from preference import Case


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("preferences")


@pytest.mark.parametrize(
    "case",
    [
        Case("dpo", {"gradient_accumulation_steps": 2}, evaluates=True),
        Case("dpo", {"precompute_ref_log_probs": True}, steps=6),
        Case("dpo", lora="new"),
        Case("reward", evaluates=True),
        Case("kto"),
        Case("kto", lora="new", steps=6),
        Case("dpo", {"gradient_checkpointing": False}, lora="new", steps=4),
        Case("kto", {"gradient_checkpointing": False}, lora="new", steps=4),
    ],
    ids=["dpo", "dpo-precomputed", "dpo-lora", "reward", "kto", "kto-lora", "dpo-whole", "kto-whole"],
)
def test_twenty_steps(tpu, models, case):
    trainers = []
    for ours in (True, False):
        trainer = preference.trainer_for(replace(case), models, ours)
        trainer.train()
        trainers.append(trainer)
    preference.assert_same_numbers(case, *(trainer.state.log_history for trainer in trainers))
    assert trainers[0].model.device.type == "tpu"
    assert trainers[0].watch.recompiles == 0
