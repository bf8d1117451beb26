import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_programs_of_the_first_step(tmp_path):
    script = Path(__file__).with_name("first_step.py")
    subprocess.run([sys.executable, script, "--quick", "--json", tmp_path / "results.json"], check=True)

    measured = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["measured"]
    runs = {result["run"]: result for result in measured}
    stock = runs.pop("stock")
    assert runs.keys() == {"layers", "checkpointed", "scan"}
    for result in runs.values():
        cold, again = result["cold"], result["again"]
        assert cold["programs"] < stock["cold"]["programs"]
        assert cold["cache"]["found"] == again["cache"]["missed"] == 0
        assert again["cache"]["found"] == cold["cache"]["missed"] >= cold["programs"]
        assert 0 < cold["cpu_seconds_of_step"] < cold["cpu_seconds"]
