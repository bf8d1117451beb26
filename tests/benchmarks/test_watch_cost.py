import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_watching_changes_neither_losses_nor_counts(tmp_path):
    written = tmp_path / "results.json"
    script = Path(__file__).with_name("watch_cost.py")
    # It fails if the losses differ.
    subprocess.run([sys.executable, script, "--quick", "--json", written], check=True)
    for pair in json.loads(written.read_text(encoding="utf-8"))["results"]:
        assert (
            pair["ours"]["per_step"] == pair["unwatched"]["per_step"] == {"compiles": 0, "executions": 1, "reads": 0}
        )
