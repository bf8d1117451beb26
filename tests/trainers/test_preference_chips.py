"""Evaluation of preferences on several chips, with fewer pairs than a batch has."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
from preference import Case, rows_for, trainer_for


# A batch has 64 pairs, which are 128 rows.
DRIVER = """
import json, sys
from pathlib import Path
from preference import Case, trainer_for
from test_preference_chips import evaluate

base, output, kind, chips, *counts = sys.argv[1:]
trainer = trainer_for(Case(kind, {"per_device_eval_batch_size": 64 // int(chips)}), Path(base), ours=True)
assert trainer.backend.num_chips == int(chips)
Path(output).write_text(json.dumps({count: evaluate(trainer, kind, int(count)) for count in counts}))
"""


def evaluate(trainer, kind, count):
    """The metrics of so many pairs, which a trainer prepares as it does its own."""
    rows = rows_for(kind, count=count, seed=2)
    return trainer.evaluate(trainer._prepare_dataset(rows, trainer.processing_class, trainer.args, "eval"))


def evaluate_on(chips, base, kind, counts):
    output = base / f"{kind}-{chips}.json"
    ran = forked.run(
        [sys.executable, "-c", DRIVER, *map(str, (base, output, kind, chips, *counts))],
        env={**os.environ, "CPU_NUM_DEVICES": str(chips)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {int(count): metrics for count, metrics in json.loads(output.read_text()).items()}


@pytest.mark.parametrize(
    ("kind", "chips", "counts"),
    [
        ("dpo", 8, [33]),
        pytest.param("reward", 8, [33], marks=pytest.mark.slow),
        pytest.param("dpo", 8, [47, 63, 70], marks=pytest.mark.slow),
        pytest.param("reward", 8, [47, 63, 70], marks=pytest.mark.slow),
        pytest.param("dpo", 2, [33, 47, 63, 70], marks=pytest.mark.slow),
        pytest.param("kto", 8, [33, 63, 70], marks=pytest.mark.slow),
    ],
)
def test_metrics_are_those_of_one_device(tmp_path, kind, chips, counts):
    """A pair is two rows, also where a first batch has hardly more rows than a full one has pairs."""
    found = evaluate_on(chips, tmp_path, kind, counts)
    stock = trainer_for(Case(kind, {"per_device_eval_batch_size": 64}), tmp_path, ours=False)
    for count in counts:
        expected = evaluate(stock, kind, count)
        names = [name for name in expected if not name.endswith(("runtime", "per_second", "time"))]
        assert "eval_loss" in names
        for name in names:
            assert found[count][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (count, name)
