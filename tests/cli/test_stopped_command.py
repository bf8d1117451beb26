"""The command, and the stock one, told to stop, say "resume me" with their exit status, and go on where they stopped."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from hf_tpu_ext.examples.tiny import make_arithmetic, make_model


def start(*args, stock=True):
    """`trl sft` with the trainers of this package, or `hf-tpu sft`, which it becomes."""
    popen = subprocess.Popen if stock else forked.Popen
    command = [Path(sys.executable).with_name("trl")] if stock else [sys.executable, "-m", "hf_tpu_ext.cli.main"]
    return popen(
        [*command, "sft", *map(str, args)],
        env={**os.environ, "HF_TPU_EXT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def command(tmp_path):
    model = make_model(tmp_path / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    data = make_arithmetic(tmp_path / "data", num_rows=64)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {model}\ndataset_name: {data}\noutput_dir: {tmp_path / 'run'}\nmax_length: 48\n"
        "per_device_train_batch_size: 4\nlogging_steps: 1\nsave_strategy: 'no'\nbf16: false\nreport_to: none\n"
    )
    return ["--config", recipe]


def stop(process, tell):
    """What it prints, told to stop after a few steps."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        if "'loss'" in line and sum("'loss'" in other for other in printed) == 3:
            tell()
    process.wait()
    return "".join(printed)


@pytest.mark.ci
def test_sigterm_and_resume(command, tmp_path):
    process = start(*command, "--max_steps", 100_000, stock=False)
    printed = stop(process, process.terminate)
    assert process.returncode == os.EX_TEMPFAIL, printed
    assert printed.count("SIGTERM: saving after this step; a second one exits immediately.") == 1
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    steps = int(checkpoint.name.rpartition("-")[2])
    assert f"Stopped by SIGTERM after step {steps}, saved in {checkpoint}." in printed
    assert "Traceback" not in printed

    process = start(*command, "--max_steps", steps + 2, "--resume_from_checkpoint", "true", stock=False)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert "Trained 2 steps" in printed and f"resumed after step {steps} of {steps + 2}" in printed
    state = json.loads((tmp_path / "run" / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    assert state["global_step"] == steps


@pytest.mark.slow
def test_ctrl_c_with_workers_that_load_data(command, tmp_path):
    """A terminal sends the signal to all processes of the command."""
    process = start(*command, "--max_steps", 100_000, "--dataloader_num_workers", 2)
    printed = stop(process, lambda: os.killpg(process.pid, signal.SIGINT))
    assert process.returncode == os.EX_TEMPFAIL, printed
    assert printed.count("SIGINT: saving after this step; a second one exits immediately.") == 1


@pytest.mark.slow
def test_ended_by_timeout(command):
    """`timeout` sends its signal to the command, and then to all processes of its group."""
    process = start(*command, "--max_steps", 100_000)
    printed = stop(process, lambda: [os.kill(process.pid, signal.SIGTERM), os.killpg(process.pid, signal.SIGTERM)])
    assert process.returncode == os.EX_TEMPFAIL, printed
