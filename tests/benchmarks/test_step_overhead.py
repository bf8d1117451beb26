import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    written = tmp_path_factory.mktemp("benchmark") / "results.json"
    script = Path(__file__).with_name("step_overhead.py")
    # It fails if the losses of any two contenders differ.
    subprocess.run([sys.executable, script, "--quick", "--json", written], check=True)
    return json.loads(written.read_text(encoding="utf-8"))["results"]


ONE_PROGRAM = {"compiles": 0, "executions": 1, "reads": 0}


@pytest.mark.slow
def test_counts_of_every_contender(results):
    assert results["bare"]["per_step"] == ONE_PROGRAM
    assert results["ours"]["per_step"] == results["stacked"]["per_step"] == ONE_PROGRAM
    # Were stock TRL's trainer replaced by this package's, it would have these counts too.
    padded, unpadded = results["stock_padded"]["per_step"], results["stock"]["per_step"]
    assert padded["compiles"] == 0 and padded["executions"] > 5 and padded["reads"] > 5
    assert unpadded["compiles"] > 0
    assert results["ours"]["programs"] < results["stock_padded"]["programs"] < results["stock"]["programs"]


@pytest.mark.slow
def test_jax_compiles_one_program_for_all_steps(results):
    assert results["jax"]["per_step"] == ONE_PROGRAM
    # The other makes the state of the optimizer.
    assert results["jax"]["programs"] == 2
