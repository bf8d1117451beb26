"""Eight devices train on completions as one does with the rows of all."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
from rollouts import OURS, WRITING, Case, assert_same_numbers, train, trainer_for


# Of 8 rows a step, and of 32 a generation.
ROWS = {
    "num_generations": 8,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "beta": 0.04,
    "per_device_eval_batch_size": 4,
}
SPECS = {
    "grpo": ("grpo", {**ROWS, "loss_type": "dapo", "top_entropy_quantile": 0.5, "mask_truncated_completions": True}),
    "grpo-fsdp": ("grpo", {**ROWS, "loss_type": "grpo", "mesh": "fsdp", "gradient_accumulation_steps": 2}),
    "grpo-model": ("grpo", {**ROWS, "generation_batch_size": 32}),
    # Ratios of whole sequences go by the exponential of a sum over tokens, and so does what the rounding of these makes of them.
    "rloo": ("rloo", {**ROWS, "learning_rate": 1e-4}),
}


def train_on_eight(spec, directory, rows=(32, 8)):
    spec_file, output_file = directory / "spec.json", directory / "output.json"
    spec_file.write_text(json.dumps(spec))
    result = forked.run(
        [sys.executable, Path(__file__).with_name("rollout_driver.py"), directory, spec_file, output_file],
        env={**os.environ, "CPU_NUM_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(output_file.read_text())
    for run in found.values():
        assert run["recompiles"] == 0 and sum(fallbacks for _, _, fallbacks, _ in run["steps"]) == 0
        assert run["rows"] == list(rows)
    return found


@pytest.mark.slow
def test_eight_devices(xla, tmp_path):
    spec = {}
    for name, (kind, settings) in SPECS.items():
        # The completions of a prompt are one on each chip.
        settings = {**settings, "per_device_train_batch_size": 1}
        if "generation_batch_size" in settings:
            # Of all devices, as upstream counts.
            del settings["steps_per_generation"]
        spec[name] = {"kind": kind, "settings": settings, "evaluates": True}
    for name, found in train_on_eight(spec, tmp_path).items():
        settings = {**spec[name]["settings"], "per_device_train_batch_size": 8, "per_device_eval_batch_size": 32}
        rewards = ("model",) if name.endswith("model") else Case.rewards
        case = Case(spec[name]["kind"], settings, evaluates=True, rewards=rewards)
        # In float64: upstream's float32 moves by 7e-6 with the number of threads.
        reference = trainer_for(case, tmp_path, ours=False)
        for model in (reference.model, reference.ref_model):
            model.double()
        reference.train()
        assert_same_numbers(found["log"], reference.state.log_history)


@pytest.mark.slow
def test_eight_devices_read_prompts_once(xla, tmp_path):
    """Each chip has all completions of its prompts, with whole weights, with parts of them, and with gradients that stay on it."""
    rows = {"num_generations": 2, "num_generations_eval": 2, "beta": 0.04, "num_iterations": 2}
    meshes = {"data": {}, "fsdp": {"mesh": "fsdp"}, "accumulated": {"gradient_accumulation_steps": 2}}
    spec = {}
    for name, settings in meshes.items():
        settings = {**rows, **settings, "steps_per_generation": 1, "per_device_train_batch_size": 2}
        spec[name] = {"kind": "grpo", "settings": {**settings, "per_device_eval_batch_size": 1}, "evaluates": True}
    for name, found in train_on_eight(spec, tmp_path, rows=(16, 16)).items():
        assert found["shares_prompts"]
        settings = {
            **spec[name]["settings"],
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 8,
        }
        reference = train(Case("grpo", settings, evaluates=True), tmp_path, ours=False)
        assert_same_numbers(found["log"], reference.state.log_history)


@pytest.mark.slow
def test_eight_devices_write_what_one_writes(xla, tmp_path, monkeypatch):
    settings = {**ROWS, "num_generations": 4, "temperature": 0.8}
    spec = {"kind": "grpo", "settings": {**settings, "per_device_train_batch_size": 1}, "evaluates": True}
    found = train_on_eight({"written": spec}, tmp_path)["written"]
    monkeypatch.setitem(OURS, "grpo", WRITING["grpo"])
    settings |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 32}
    one = train(Case("grpo", settings, evaluates=True), tmp_path, ours=True)
    assert_same_numbers(found["log"], one.state.log_history)


@pytest.mark.slow
def test_a_run_of_eight_devices_goes_on_on_one(xla, tmp_path, monkeypatch):
    """In the middle of a generation, with the same rows of a step and of a generation."""
    settings = {**ROWS, "num_generations": 4, "per_device_train_batch_size": 1}
    saves = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path / "eight")}
    train_on_eight({"written": {"kind": "grpo", "settings": {**settings, **saves}}}, tmp_path)
    monkeypatch.setitem(OURS, "grpo", WRITING["grpo"])
    resumed = trainer_for(Case("grpo", settings), tmp_path, ours=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "eight" / "checkpoint-3"))
    args = resumed.args
    assert (args.gradient_accumulation_steps, args.generation_batch_size, args.steps_per_generation) == (8, 32, 32)
    whole = json.loads((tmp_path / "eight" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    # The log of step 4 covers a step before the checkpoint as well, on one of the two. Other metrics are means over micro-steps.
    mine, other = (next(entry for entry in log if entry["step"] == 6) for log in (resumed.state.log_history, whole))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
