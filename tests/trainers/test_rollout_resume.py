"""A run on completions that is resumed is the run that was never stopped, also in the middle of what was generated."""

from dataclasses import replace

import pytest
import torch
from rollouts import Case, trainer_for
from safetensors.torch import load_file
from test_preference_resume import logged_after, weights_and_moments


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("resumed")


# A generation is 6 micro-steps: 3 slices, twice.
REUSED = {"num_iterations": 2, "steps_per_generation": 3}
CASES = {
    "grpo": Case("grpo", {**REUSED, "beta": 0.04, "loss_type": "dapo"}),
    "grpo-accumulated": Case("grpo", {**REUSED, "gradient_accumulation_steps": 2, "temperature": 0.7}, lora="new"),
    "grpo-synced": Case("grpo", {**REUSED, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    "grpo-adaptive": Case("grpo", {**REUSED, "use_adaptive_entropy": True, "entropy_target": 5.4}),
    "grpo-evaluated": Case("grpo", {**REUSED}, evaluates=True),
    # Of two steps: each has an order of its own.
    "grpo-epochs": Case("grpo", {"per_device_train_batch_size": 16}),
    "rloo": Case("rloo", {**REUSED, "beta": 0.04}),
}


@pytest.mark.parametrize(
    "buffered", [None, [{"prompt_ids": torch.ones(2, 3), "num_images": [1, 2]}]], ids=["none", "images"]
)
def test_a_generation_that_is_not_saved(xla, models, tmp_path, buffered):
    """Before the first step of a resumed run there may be none; and rows of images are not those of the batch."""
    trainer = trainer_for(CASES["rloo"], models, ours=True)
    trainer._step, trainer._buffered_inputs, trainer._is_vlm = 1, buffered, buffered is not None
    trainer._save_rng_state(str(tmp_path))
    assert set(load_file(tmp_path / "rollouts.safetensors")) == {"step", "rows", "generation_rows"}


# By default, `test_rollouts_written.py` resumes.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_resumes_bit_for_bit(xla, models, tmp_path, name):
    saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "run")}
    case = replace(CASES[name], steps=10)
    whole = trainer_for(replace(case, settings={**case.settings, **saves}), models, ours=True)
    whole.train()
    assert len({str(entry["completions/mean_length"]) for entry in logged_after(whole, 0) if "reward" in entry}) > 1
    # In the middle of what was generated, and behind it.
    for step, same_after in ((4, 4), (6, 6), (7, 8)):
        resumed = trainer_for(case, models, ours=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(whole), rtol=0, atol=0)
        assert logged_after(resumed, same_after) == logged_after(whole, same_after) != []
