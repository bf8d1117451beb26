import math
from functools import partial

import kd_recovery
import pytest
import qad_recovery
from datasets import load_dataset
from qad_recovery import METHODS, Row
from qad_recovery_tables import ORIGINAL, ROUNDED, describe, make_tables

from hf_tpu_ext.examples.tiny import make_arithmetic


BESIDE, INSIDE = "recovery LoRA beside, cached teacher", "low-rank QAT, cached teacher"
SEARCHED, NOT_TRAINED = "QAT, searched scales, cached teacher", "rounded only, searched scales"
OWN = "QAT, searched scales, cached teacher, own text"
SHOWN = (NOT_TRAINED, BESIDE, INSIDE, SEARCHED, OWN)


def test_one_seed_of_every_row_comes_first():
    found = list(qad_recovery.rows(qad_recovery.parse_arguments(["--seeds", "2"])))
    assert found[:3] == [Row(bits, ROUNDED) for bits in (4, 3, 2)]
    assert found[3:24] == [Row(bits, name) for bits in (4, 3, 2) for name in METHODS]
    compared = (BESIDE, "QAT, cached teacher", SEARCHED, OWN)
    assert found[24:] == [Row(bits, name, 1) for bits in (4, 3) for name in compared]
    assert len({row.directory for row in found}) == len(found)


def test_tables():
    def result(loss, num_bytes):
        return {"a": {"loss": loss, "kl": 0.1}, "b": {"loss": loss + 1, "kl": 0.3}, "bytes": num_bytes}

    rounded = {ROUNDED: [result(3.0, 500)], INSIDE: [result(1.5, 500), result(2.5, 500)]}
    tables = make_tables({ORIGINAL: result(1.0, 2000), "int4": rounded}, ["a", "b"])
    assert f"| bfloat16 | original | 2.00 kB | {math.exp(1.5):.2f} | | | |" in tables
    assert f"| int4 | rounded only | 500 B | {math.exp(3.5):.2f} |  | 0.200 |  |" in tables
    mean, spread = (math.exp(2) + math.exp(3)) / 2, (math.exp(3) - math.exp(2)) / 2**0.5
    assert f"| int4 | {INSIDE} | 500 B | {mean:.2f} ± {spread:.2f} | 50.0% ± 35.4% | 0.200 ± 0.000 | 2 |" in tables
    assert f"| int4 | {INSIDE} | 50.0%; 0.100 | 50.0%; 0.300 |" in tables


def test_description_has_the_settings_that_were_run():
    arguments = qad_recovery.parse_arguments(["--steps", "7", "--seeds", "2", "--bits", "3", "--methods", INSIDE])
    lines = describe(arguments, METHODS, {"verse": 2032})
    assert "7 steps of 4 x 128 tokens, 3,584 in all" in lines
    assert f"{METHODS[INSIDE].rates()} for {INSIDE}; AdamW" in lines
    assert "2,032 tokens of verse" in lines
    assert f'qad_recovery.py --steps 7 --seeds 2 --bits 3 --methods "{INSIDE}"`' in lines


@pytest.fixture
def task(tmp_path, monkeypatch, xla):
    monkeypatch.setattr(kd_recovery, "make_arithmetic", partial(make_arithmetic, num_rows=64))
    options = ["--tiny", "--teacher_steps=40", "--steps=8", "--seeds=1", "--bits", "3", "--no-bf16"]
    arguments = qad_recovery.parse_arguments([*options, "--methods", *SHOWN, "--work_dir", str(tmp_path)])
    task = qad_recovery.prepare_tiny(arguments, tmp_path)
    qad_recovery.make_caches(task)
    return task


@pytest.mark.slow
def test_whole_comparison_in_small(task, monkeypatch):
    results = qad_recovery.compare(task)
    assert list(results["int3"]) == [ROUNDED, *SHOWN]
    (rounded,), (searched,), (beside,), (inside,), (trained,), (of_own_text,) = results["int3"].values()
    original = results[ORIGINAL]
    assert original["additions"]["kl"] == 0 and original["additions"]["loss"] < rounded["additions"]["loss"]
    for brought_back in (beside, inside, searched, of_own_text):
        assert brought_back["additions"]["kl"] < 0.9 * rounded["additions"]["kl"]
    assert trained["additions"]["kl"] < 0.9 * searched["additions"]["kl"]
    # Adapters inside the rounding are in the integers, those beside it are more to store.
    assert inside["bytes"] == rounded["bytes"] < original["bytes"]
    assert beside["bytes"] > rounded["bytes"]
    # What is there is not made again, unless a setting is another one.
    monkeypatch.setattr(qad_recovery, "make", fail)
    assert qad_recovery.compare(task) == results
    task.arguments.rank = 4
    with pytest.raises(NotImplementedError, match=NOT_TRAINED):
        qad_recovery.compare(task)


@pytest.mark.slow
def test_own_text_is_written_once(task):
    rows = load_dataset("json", data_dir=str(task.directory / "own_text" / "data"))["train"]["input_ids"]
    assert len(rows) == 8 * 4 and {len(row) for row in rows} == {128}
    assert len({tuple(row) for row in rows}) > 1
    file = task.directory / "own_text" / "data" / "train.jsonl"
    written = file.stat().st_mtime_ns
    assert qad_recovery.write_own_text(task).directory == task.directory / "own_text"
    assert file.stat().st_mtime_ns == written
    task.arguments.steps = 2
    qad_recovery.write_own_text(task)
    assert len(file.read_text().splitlines()) == 8


def fail(row, task):
    raise NotImplementedError(row.name)
