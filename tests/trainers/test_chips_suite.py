"""The tests of trajectories, counts, evaluation, packing, checkpoints, frozen weights and images once more, on four chips."""

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


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"TEST_FULLY_SHARDED": "1"}], ids=["data", "fsdp"])
def test_everything_holds_on_four_chips(settings):
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *(HERE / name for name in FILES)],
        env={**os.environ, "CPU_NUM_DEVICES": "4", **settings},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout
