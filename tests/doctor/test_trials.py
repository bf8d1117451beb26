"""A training in a process of its own: what goes wrong there is told, and does not take the doctor along."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.doctor.smoke import PHASES, SmokeTest


TICK = """
import json, os, sys, time
def tick(name, status="ok", fix=None):
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps({"name": name, "status": status, "text": "done", "fix": fix}) + "\\n")
tick("runtime")
tick("data")
"""


def watch(script, patience=30.0):
    smoke = SmokeTest((sys.executable, "-c", TICK + script), patience=patience)
    return list(smoke.run()), smoke


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("os.kill(os.getpid(), 11)", "crashed (SIGSEGV)"),
        ("os.abort()", "crashed (SIGABRT)"),
        ("os.kill(os.getpid(), 9)", "killed by the system"),
        ("print('before', flush=True); raise RuntimeError('no device')", "RuntimeError: no device"),
        ("sys.exit(0)", "it wrote nothing"),
    ],
)
def test_an_end_in_the_middle_is_told(script, text):
    checks, smoke = watch(script)
    assert [(check.name, check.status) for check in checks] == [
        ("runtime", "ok"),
        ("data", "ok"),
        ("forward", "failed"),
    ]
    assert text in checks[-1].text, smoke.output
    if "before" in script:
        assert smoke.output.startswith("before\n")
        assert "Traceback" in smoke.output


def test_a_training_that_hangs_is_ended_with_its_workers(tmp_path):
    script = f"""
if os.fork() == 0:
    open({str(tmp_path / "worker")!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    checks, _ = watch(script, patience=2.0)
    assert checks[-1].name == "forward"
    assert "nothing happened for 2 s" in checks[-1].text
    worker = int((tmp_path / "worker").read_text())
    # Not at once: somebody has to take note of its end.
    for _ in range(200):
        try:
            if (Path("/proc") / str(worker) / "stat").read_text().split()[2] == "Z":
                break
        except FileNotFoundError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker goes on")


@pytest.mark.parametrize(
    ("script", "fix"),
    [
        ("raise ImportError('undefined symbol: _ZN5torch')", "--force-reinstall"),
        ("time.sleep(600)", "a TPU that another"),
    ],
)
def test_a_runtime_that_does_not_come_up(script, fix):
    (check,) = SmokeTest((sys.executable, "-c", f"import time; {script}"), patience=1.0).run()
    assert (check.name, check.status) == ("runtime", "failed") and fix in check.fix


def test_a_phase_that_fails_is_the_last():
    checks, _ = watch("tick('forward', 'failed', 'do this'); time.sleep(600)")
    assert (checks[-1].name, checks[-1].fix) == ("forward", "do this")


def test_what_was_begun_is_ended_when_nobody_watches(tmp_path):
    script = f"open({str(tmp_path / 'training')!r}, 'w').write(f'{{os.getpid()}} {{sys.argv[1]}}'); tick('forward'); time.sleep(600)"
    ticks = SmokeTest((sys.executable, "-c", TICK + script)).run()
    assert [next(ticks).name for _ in range(3)] == ["runtime", "data", "forward"]
    ticks.close()
    process, directory = (tmp_path / "training").read_text().split()
    assert not os.path.exists(f"/proc/{process}")
    assert not os.path.exists(directory)


@pytest.mark.parametrize("value", [1.06, 0.94, math.nan, math.inf])
def test_a_wrong_number_is_told(value):
    from hf_tpu_ext.doctor.training import WrongError, _check_near

    _check_near("the loss", 1.04, 1.0)
    with pytest.raises(WrongError, match="the loss is .*1.0000 on eager CPU") as error:
        _check_near("the loss", value, 1.0)
    assert error.value.fix


def run_doctor(*options, **variables):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=500)


@pytest.mark.slow
def test_this_machine(tmp_path):
    result = run_doctor("--json", str(tmp_path / "found.json"), HF_TPU_EXT_BACKEND="cpu", PYTHONIOENCODING="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "✓ export" in result.stdout
    assert result.stdout.endswith("everything passed\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"]
    assert tuple(check["name"] for check in found["checks"][-len(PHASES) :]) == PHASES
    assert os.listdir(tmp_path) == ["found.json"]
    alone = run_doctor("--no-smoke", "--json", "-", HF_TPU_EXT_BACKEND="cpu", PYTHONIOENCODING="utf-8")
    assert json.loads(alone.stdout)["ok"] and "✓ backend" in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize("chips", [1, 4])
def test_this_machine_with_xla(chips):
    result = run_doctor(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(chips), PYTHONIOENCODING="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    sync = next(line for line in result.stdout.splitlines() if "gradient sync" in line)
    assert ("4 chips have the gradient of one device" in sync) == (chips == 4)


@pytest.mark.slow
def test_the_training_tells_what_is_wrong(monkeypatch):
    """No result is exactly that of eager float32."""
    monkeypatch.setenv("HF_TPU_EXT_BACKEND", "cpu")
    script = (
        "import sys; from hf_tpu_ext.doctor import training; training._TOLERANCE = 0; training.main(*sys.argv[1:])"
    )
    *_, last = SmokeTest((sys.executable, "-c", script)).run()
    assert (last.name, last.status) == ("forward", "failed")
    assert "on eager CPU" in last.text


def test_a_failure_is_the_status_and_marks_are_plain_where_they_have_to_be():
    result = run_doctor("--no_smoke", HF_TPU_EXT_BACKEND="gpu", PYTHONIOENCODING="ascii")
    assert result.returncode == 1, result.stderr
    assert "FAILED backend" in result.stdout
    assert "Unknown HF_TPU_EXT_BACKEND='gpu'" in result.stdout
    assert "fix:" in result.stdout
    assert result.stdout.endswith("1 failed: backend\n")
    assert "smoke training run" not in result.stdout
    assert result.stdout.isascii()


def test_bad_arguments(tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--smoke"])
    assert stop.value.code == 2
