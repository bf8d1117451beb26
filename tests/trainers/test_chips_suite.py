"""The tests of trajectories, counts, evaluation, packing, checkpoints, frozen weights, images and adapters once more, on four chips."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent
FILES = [
    "test_trajectory.py",
    "test_counts.py",
    "test_evaluation.py",
    "test_packing.py",
    "test_checkpoints.py",
    "test_frozen_training.py",
    "test_alternating_layers.py",
    "test_images.py",
]


def run_on_four_chips(*tests, marks="not slow", **settings):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, *tests],
        env={**os.environ, "CPU_NUM_DEVICES": "4", **settings},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"TEST_FULLY_SHARDED": "1"}], ids=["data", "fsdp"])
def test_everything_holds_on_four_chips(settings):
    run_on_four_chips(*(HERE / name for name in FILES), **settings)


@pytest.mark.slow
def test_every_adapter_on_four_chips():
    run_on_four_chips(HERE / "test_peft_adapters.py", marks="slow")


# Chips that compute gradients by themselves are given the weights that are trained.
@pytest.mark.ci
def test_an_optimizer_whose_weights_for_evaluation_are_others_on_four_chips():
    run_on_four_chips(f"{HERE / 'test_evaluation.py'}::test_an_optimizer_whose_weights_for_evaluation_are_others")
