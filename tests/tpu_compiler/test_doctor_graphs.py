import json
import subprocess
import sys
from pathlib import Path

import pytest


# Of the ten minutes that `hf-tpu doctor --full` may take on a TPU.
MOST_CPU_SECONDS = 300


@pytest.mark.slow
def test_the_compiler_leaves_time_for_the_trainings():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("doctor_graphs.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["graphs"] == 21, done.stdout
    assert found["cpu_seconds"] < MOST_CPU_SECONDS, done.stdout
