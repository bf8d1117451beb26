import json
import random

import pytest

from hf_tpu_ext.report.record import RECORD_NAME, RecordWriter, read_run


def test_what_is_written_is_read(write_run, tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert (run.steps, run.seconds, run.unreadable) == (40, 3600.0, 0)
    assert [entry["step"] for entry in run.logs] == list(range(5, 41, 5))
    assert [entry["eval_loss"] for entry in run.evaluations] == [2.0]
    assert [(one["kind"], one["at"]) for one in run.programs] == [("training step", 2.5)]
    assert run.phases["replay"] == pytest.approx(0.3 * 8) and run.phases["save"] == 0.5
    assert run.step_times["total"] == {-25: 24, -24: 16}
    assert run.batches == {(4, 16): [48, 2400, 3072], (4, 64): [32, 5600, 8192]}
    assert run.counters["replays"] == 38 and run.why_traced is None


def test_a_run_that_begins_anew_replaces_the_record(write_run, tmp_path):
    write_run(tmp_path / "run")
    run = read_run(write_run(tmp_path / "run", steps=10))
    assert len(run.sessions) == 1 and [entry["step"] for entry in run.logs] == [5, 10]


def test_a_resumed_run_goes_on(write_run, tmp_path):
    """Killed after step 30, resumed from the checkpoint of step 20."""
    write_run(tmp_path / "run", steps=30, end=False)
    run = read_run(write_run(tmp_path / "run", first_step=20, anew=False))
    assert [entry["step"] for entry in run.logs] == list(range(5, 41, 5))
    # The first session is known until its last log.
    assert run.seconds == 63.0 + 3600.0
    assert run.logs[4]["at"] == 63.0 + 13.0, "step 25 of the second session"
    assert [one["at"] for one in run.programs] == [2.5, 63.0 + 2.5]
    assert [session.end is None for session in run.sessions] == [True, False]


def test_an_evaluation_that_a_resumed_run_makes_once_more(write_run, tmp_path):
    write_run(tmp_path / "run", steps=20, held_out={"eval_loss": 3.0})
    run = read_run(write_run(tmp_path / "run", steps=20, first_step=20, anew=False))
    assert [(log["step"], log["eval_loss"]) for log in run.evaluations] == [(20, 2.0)]


def test_a_run_that_is_killed_at_any_moment_can_be_read(write_run, tmp_path):
    path = write_run(tmp_path / "run") / RECORD_NAME
    whole = path.read_bytes()
    first_line = whole.index(b"\n")
    for size in random.Random(0).sample(range(first_line, len(whole)), 60):
        path.write_bytes(whole[:size])
        run = read_run(path.parent)
        assert run.unreadable <= 1 and len(run.logs) <= 8
        # And it goes on with a line of its own.
        writer = RecordWriter(path.parent, anew=False)
        writer.write(**json.loads(whole.splitlines()[-1]))
        assert read_run(path.parent).sessions[0].end is not None
        assert path.read_bytes().count(b"\n") == whole[:size].count(b"\n") + 1 + (not whole[:size].endswith(b"\n"))
    path.write_bytes(whole[: first_line // 2])
    with pytest.raises(ValueError, match="damaged"):
        read_run(path.parent)


def test_lines_that_somebody_has_edited_are_left_out(write_run, tmp_path):
    path = write_run(tmp_path / "run") / RECORD_NAME
    lines = path.read_text().splitlines()
    for number, damaged in {
        2: "[]",
        3: '{"event": "log"}',
        4: '{"event": "party"}',
        5: "3",
        6: '{"event": "log", "at": "x", "step": 1}',
    }.items():
        lines[number] = damaged
    path.write_text("\n".join(lines))
    run = read_run(path.parent)
    assert run.unreadable == 5 and [entry["step"] for entry in run.logs] == [30, 35, 40]


def test_a_clock_that_goes_back_shortens_nothing(write_run, tmp_path):
    path = write_run(tmp_path / "run", end=False) / RECORD_NAME
    writer = RecordWriter(path.parent, anew=False)
    writer.write(**{**json.loads(path.read_text().splitlines()[1]), "at": 1.0})
    assert read_run(path.parent).seconds == 83.0


def test_what_is_no_run_is_told_from_one(write_run, tmp_path):
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs" / "a")
    with pytest.raises(ValueError, match=r"is not the directory of a run.*Runs in it: .*a\. Give the output_dir"):
        read_run(tmp_path / "runs")
    with pytest.raises(ValueError, match="is not the directory of a run"):
        read_run(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not the directory of a run"):
        read_run(tmp_path / "file")


def test_medians_leave_out_the_first_log_of_each_session(write_run, tmp_path):
    """It has the steps that were traced in it."""
    write_run(tmp_path / "run", steps=10, end=False, logs={"speed": 1.0})
    path = write_run(tmp_path / "run", first_step=10, anew=False, steps=20, logs={"speed": 2.0}) / RECORD_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    speeds = {5: 10.0, 10: 20.0, 15: 30.0, 20: 40.0}
    for line in lines:
        if "speed" in line.get("logs", {}):
            line["logs"]["speed"] = speeds[line["step"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(path.parent).middle("speed") == 30.0, "the median of 20 and 40"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert read_run(path.parent).middle("speed") == 10.0, "there is no other"
