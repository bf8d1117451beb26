import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_counts_of_every_contender(tmp_path):
    script = Path(__file__).with_name("step_overhead.py")
    subprocess.run([sys.executable, script, "--quick", "--json", tmp_path / "results.json"], check=True)

    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["results"]
    one_program = {"compiles": 0, "executions": 1, "reads": 0}
    assert results["bare"]["per_step"] == one_program
    assert results["ours"]["per_step"] == one_program
    # Were stock TRL's trainer replaced by this package's, it would have these counts too.
    padded, unpadded = results["stock_padded"]["per_step"], results["stock"]["per_step"]
    assert padded["compiles"] == 0 and padded["executions"] > 5 and padded["reads"] > 5
    assert unpadded["compiles"] > 0
    assert results["ours"]["programs"] < results["stock_padded"]["programs"] < results["stock"]["programs"]
