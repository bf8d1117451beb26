"""Training on completions in two processes with a device each: every logged number is upstream's in two processes on the CPU."""

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainers")]

import rollouts  # noqa: E402
from ranks_data import on_ranks  # noqa: E402
from rollouts import Case, assert_same_numbers  # noqa: E402


WHOLE = {"compile_step": "step", "gradient_checkpointing": False}
REUSED = {"num_iterations": 2, "steps_per_generation": 2}
STARTS = {
    # Completions of a prompt are in both processes.
    "grpo": dict(
        WHOLE,
        **REUSED,
        rollout={"kind": "grpo", "lora": "new", "steps": 6},
        num_generations=8,
        loss_type="grpo",
        beta=0.04,
        delta=1.05,
        top_entropy_quantile=0.4,
        entropy_coef=0.01,
        mask_truncated_completions=True,
        gradient_accumulation_steps=2,
    ),
    "distillation": dict(
        rollout={"kind": "distillation", "rewards": [], "evaluates": True, "steps": 4},
        beta=0.3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    ),
}
SLOW = {
    # Ratios of whole sequences go by the exponential of a sum over tokens, and so does what the rounding of these makes of them.
    "rloo": dict(
        WHOLE, **REUSED, rollout={"kind": "rloo", "evaluates": True, "steps": 6}, beta=0.04, learning_rate=1e-4
    ),
    "grpo-layers": dict(
        REUSED,
        rollout={"kind": "grpo", "evaluates": True, "steps": 6},
        beta=0.04,
        gradient_accumulation_steps=2,
        num_generations=8,
    ),
    "grpo-adaptive": dict(
        rollout={"kind": "grpo", "steps": 6},
        use_adaptive_entropy=True,
        entropy_target=5.4,
        entropy_coef_delta=0.01,
        entropy_coef=0.02,
    ),
    "rloo-reward-model": dict(
        rollout={"kind": "rloo", "lora": "given", "steps": 4, "rewards": ["model"]}, steps_per_generation=2
    ),
}
# In the middle of a generation after step 2, which a run that goes on is not to write again.
WRITTEN = dict(
    WHOLE,
    **REUSED,
    rollout={"kind": "grpo", "steps": 8},
    writes=True,
    num_generations=8,
    save_strategy="steps",
    save_steps=2,
    logging_steps=1,
)


def assert_upstreams(starts, tiny_model, directory):
    found, _ = on_ranks(starts, tiny_model, directory)
    upstream, _ = on_ranks({name: {**start, "ours": False} for name, start in starts.items()}, tiny_model, directory)
    for name in starts:
        first, second = (rank[name] for rank in found)
        assert first["weights"] == second["weights"] and first["shapes"] == second["shapes"], name
        assert first["compiles"][0] > 0 and first["compiles"][1:] == [0] * (first["step"] - 1), name
        assert_same_numbers(first["log"], upstream[0][name]["log"])


def test_every_number_is_upstreams(tpu, tiny_model, tmp_path):
    assert_upstreams(STARTS, tiny_model, tmp_path)


@pytest.mark.slow
def test_every_number_of_more_settings(tpu, tiny_model, tmp_path):
    assert_upstreams(SLOW, tiny_model, tmp_path)


def test_a_run_goes_on_with_the_completions_of_all(tpu, tiny_model, tmp_path, monkeypatch):
    """In two processes bit for bit, in one with the same rows. What is split over processes is refused."""
    split = {"rollout": {"kind": "grpo"}, "mesh": "fsdp", "refused": True}
    found, _ = on_ranks({"whole": WRITTEN, "split": split}, tiny_model, tmp_path)
    whole, other = (rank["whole"] for rank in found)
    assert whole["weights"] == other["weights"] and whole["compiles"][1:] == [0] * 7
    assert all("mesh='fsdp' does not work" in rank["split"]["refused"] for rank in found)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    # Each writes other completions of the same prompts.
    ids = load_file(checkpoint / "rollouts.safetensors")["0.completion_ids"]
    assert len(ids) == 8 and (ids[:4] != ids[4:]).any()
    shutil.copytree(checkpoint, tmp_path / "one" / checkpoint.name)
    (again, _), _ = on_ranks({"whole": dict(WRITTEN, resume=str(checkpoint))}, tiny_model, tmp_path)
    assert again["whole"]["weights"] == whole["weights"]
    assert of_steps(again["whole"]["log"], range(3, 9)) == of_steps(whole["log"], range(3, 9))

    monkeypatch.setattr(rollouts, "_model_dir", lambda *_, **__: tiny_model)
    monkeypatch.setitem(rollouts.OURS, "grpo", rollouts.WRITING["grpo"])
    settings = {name: value for name, value in WRITTEN.items() if name not in ("rollout", "writes")}
    settings |= {"output_dir": str(tmp_path / "one")}
    case = Case("grpo", settings, rewards=(early,), steps=8)
    one = rollouts.trainer_for(case, tmp_path, ours=True, train_dataset=rollouts.prompts_for(case, 8))
    one.train(resume_from_checkpoint=str(tmp_path / "one" / checkpoint.name))
    # What comes after the generation of the checkpoint is drawn by one process.
    assert_same_numbers(of_steps(one.state.log_history, [3, 4]), of_steps(whole["log"], [3, 4]))


def early(completion_ids, **kwargs):
    """Tokens of the first half of the vocabulary."""
    return [sum(token < 128 for token in tokens) / len(tokens) for tokens in completion_ids]


def of_steps(log, steps):
    names = ("loss", "grad_norm", "learning_rate", "entropy", "step")
    return [{name: entry[name] for name in names} for entry in log if "loss" in entry and entry["step"] in steps]
