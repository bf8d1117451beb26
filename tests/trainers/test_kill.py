"""A run that is killed again and again, with SIGKILL, ends with the weights of the run that never was."""

import json
import random
import signal
import subprocess
import sys
import time

import cpu_plugin
import forked
import kill_driver
import pytest
import torch
from differential import TIMED


def train_and_kill(kind, model_dir, output_dir, kill_at, delay):
    """Train in a process of its own, and kill it at `kill_at`: in a save at once, in a step after `delay` seconds."""
    command = [sys.executable, cpu_plugin.__file__, kill_driver.__file__, kind, str(model_dir), str(output_dir)]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("reached "):
                continue
            moment = line.removeprefix("reached ").strip()
            if moment == kill_at and moment.startswith("save"):
                process.kill()
                break
            process.stdin.write("\n")
            process.stdin.flush()
            if moment == kill_at:
                time.sleep(delay)
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL


def without_times(entry):
    return {key: value for key, value in entry.items() if not any(word in key for word in TIMED)}


def times(kind, name, steps, saves, marks=()):
    return pytest.param(kind, steps, saves, marks=marks, id=f"{kind}-{name}")


@pytest.mark.parametrize(
    ("kind", "steps", "saves"),
    [
        times("sft", "once", 0, 1, pytest.mark.ci),
        *(times(kind, "five-times", 3, 2, pytest.mark.slow) for kind in kill_driver.KINDS),
    ],
)
def test_killed_run_ends_with_the_same_weights(xla, tiny_model, wide_model, tmp_path, kind, steps, saves):
    """Killed at random moments of steps, and in saves: the checkpoint that was being written is left without its end."""
    models = {"sft": tiny_model, "qlora": wide_model}.get(kind, tmp_path)
    moments = []
    kill_driver.train(kind, models, tmp_path / "undisturbed", moments.append)

    rng = random.Random(steps)
    killed_at = rng.sample([moment for moment in moments if moment.startswith("step")], steps)
    killed_at += rng.sample([moment for moment in moments if moment.startswith("save")], saves)
    for moment in sorted(killed_at, key=moments.index):
        train_and_kill(kind, models, tmp_path / "killed", moment, delay=rng.uniform(0, 0.02))
        if moment.startswith("save"):
            name = f"checkpoint-{moment.removeprefix('save ')}"
            half_written = tmp_path / "killed" / f"_tmp-{name}" / name
            assert (half_written / "optimizer.pt").exists() and not (half_written / "trainer_state.json").exists()
            assert not (tmp_path / "killed" / name).exists()
    moments_of_last = []
    kill_driver.train(kind, models, tmp_path / "killed", moments_of_last.append)
    assert len(moments_of_last) < len(moments)

    last = f"checkpoint-{kill_driver.MAX_STEPS}"
    weights = "model.safetensors" if kind in ("sft", "images") else "adapter_model.safetensors"
    for name in (weights, f"{last}/{weights}", "ema.safetensors", f"{last}/ema.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    killed, undisturbed = (
        torch.load(tmp_path / run / last / "optimizer.pt", weights_only=True) for run in ("killed", "undisturbed")
    )
    torch.testing.assert_close(killed["state"], undisturbed["state"], rtol=0, atol=0)
    killed, undisturbed = (
        json.loads((tmp_path / run / last / "trainer_state.json").read_text()) for run in ("killed", "undisturbed")
    )
    assert [without_times(entry) for entry in killed["log_history"]] == [
        without_times(entry) for entry in undisturbed["log_history"]
    ]
