"""A run that is stopped again and again, at any moment, ends with the weights of the run that never was."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import forked
import pytest
import stopped_run
import torch

from hf_tpu_ext.examples.tiny import make_model


PREEMPTED = os.EX_TEMPFAIL


def run(model_dir, output_dir, log, number=None, moment=None):
    """
    Run in a process of its own, and send it a signal at a moment: how many steps to wait for, and how long after the last.

    Returns the exit status, and the seconds at which `training`, each `step` and `trained` were told.
    """
    command, times = [sys.executable, stopped_run.__file__, model_dir, output_dir], []
    with (
        open(log, "a", encoding="utf-8") as file,
        forked.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        for line in process.stdout:
            if line not in ("training\n", "step\n", "trained\n"):
                file.write(line)
                continue
            times.append(time.monotonic())
            if number is not None and len(times) == 1 + moment[0]:
                time.sleep(moment[1])
                process.send_signal(number)
    return process.returncode, times


def sessions(output_dir):
    """For each process: the step that it began from and the last one that it ended, or `None` if it began none."""
    found = []
    for line in (output_dir / "steps.txt").read_text().splitlines():
        word, _, step = line.partition(" ")
        if word == "process":
            found.append(None)
        elif word == "from":
            found[-1] = [int(step), int(step)]
        else:
            assert int(step) == found[-1][1] + 1
            found[-1][1] = int(step)
    return found


def evaluations(output_dir):
    state = json.loads((output_dir / f"checkpoint-{stopped_run.MAX_STEPS}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry}


def assert_same_end(output_dir, undisturbed):
    last = f"checkpoint-{stopped_run.MAX_STEPS}"
    for name in ("model.safetensors", f"{last}/model.safetensors"):
        assert (output_dir / name).read_bytes() == (undisturbed / name).read_bytes()
    ours, theirs = (
        torch.load(run / last / "optimizer.pt", weights_only=True)["state"] for run in (output_dir, undisturbed)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert evaluations(output_dir) == evaluations(undisturbed)
    assert not list(output_dir.glob("_tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "kills"),
    [(["SIGTERM", "SIGKILL"], 3), (["SIGKILL"], 50), (["SIGTERM"], 50)],
    ids=["slice", "SIGKILL", "SIGTERM"],
)
def test_random_moments(tmp_path, names, kills):
    """
    Stopped at random moments: first while the step is compiled, then there or within the next steps and what belongs to
    them.

    Each run is resumed until it ends; then the next one begins, until there were enough kills.
    """
    rng = random.Random(f"{names} {kills}")
    model = make_model(tmp_path / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    undisturbed, stopped, log = tmp_path / "undisturbed", tmp_path / "stopped", tmp_path / "log.txt"
    killed = runs = repeated = 0
    status, times = run(model, undisturbed, log)
    assert status == 0, log.read_text()[-3000:]
    until_first_step, per_step = times[1] - times[0], (times[-1] - times[1]) / stopped_run.MAX_STEPS
    while killed < kills:
        status, allowed = None, []
        while status != 0:
            number = signal.Signals[rng.choice(names)] if killed < kills else None
            steps = rng.randrange(2 * stopped_run.SAVE_STEPS) if killed else 0
            moment = (steps, rng.uniform(0, per_step if steps else until_first_step))
            status, _ = run(model, stopped, log, number, moment)
            # A run may have ended before its signal, or be past `train`, where signals are not listened to.
            expected = {0, -signal.SIGKILL} if number == signal.SIGKILL else {0, PREEMPTED, -signal.SIGTERM}
            assert status in expected, log.read_text()[-3000:]
            killed += status != 0
            allowed.append(stopped_run.SAVE_STEPS if number == signal.SIGKILL else 0)
        assert_same_end(stopped, undisturbed)
        trained = [steps for steps in zip(sessions(stopped), allowed, strict=True) if steps[0] is not None]
        for ((_, ended), most), ((began, _), _) in pairwise(trained):
            assert 0 <= ended - began <= most
            repeated += ended - began
        runs += 1
        shutil.rmtree(stopped)
    print(f"{killed} kills ({' and '.join(names)}) in {runs} runs, {repeated} steps repeated")
