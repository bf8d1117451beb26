"""Trainings in processes of their own: what goes wrong there is told, and does not take the doctor along."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.doctor.trials import MECHANISMS, QUICK, Trials


TICK = """
import json, os, sys, time
def tick(name, status="ok", fix=None):
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps({"name": name, "status": status, "text": "done", "fix": fix}) + "\\n")
if sys.argv[3] == "runtime":
    tick("runtime")
"""


def watch(script, seconds=30.0, groups=(("runtime", "parity"),)):
    """Trials whose processes get so many seconds for each mechanism."""
    trials = Trials(groups, seconds / 18, (sys.executable, "-c", TICK + script))
    return list(trials.run()), trials


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
    checks, trials = watch(script)
    assert [(check.name, check.status) for check in checks] == [("runtime", "ok"), ("parity", "failed")]
    assert text in checks[-1].text, trials.output
    assert checks[-1].fix == MECHANISMS["parity"]
    if "before" in script:
        assert trials.output.startswith("before\n")
        assert "Traceback" in trials.output


@pytest.mark.ci
def test_a_training_that_hangs_is_ended_with_its_workers(tmp_path):
    script = f"""
if os.fork() == 0:
    open({str(tmp_path / "worker")!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    checks, _ = watch(script, seconds=2.0)
    assert checks[-1].name == "parity"
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
def test_without_a_runtime_there_are_no_others(script, fix):
    trials = Trials([("runtime", "parity"), ("replay",)], 1 / 18, (sys.executable, "-c", f"import time; {script}"))
    (check,) = trials.run()
    assert (check.name, check.status) == ("runtime", "failed") and fix in check.fix
    assert ("undefined symbol" in trials.output) == ("undefined symbol" in script)


WORKER = """
for name in sys.argv[3:]:
    if name == "replay":
        os.kill(os.getpid(), 11)
    if name == "bfloat16":
        time.sleep(600)
    if name == "accumulation":
        tick(name, "failed", "do that")
        sys.exit(1)
    tick(name)
"""


def test_what_fails_hides_nothing():
    names = ["parity", "replay", "donation", "accumulation", "bfloat16", "teacher"]
    results, _ = watch(WORKER, 4, [names])
    checks = {check.name: check for check in results}
    assert list(checks) == names
    assert [check.name for check in checks.values() if check.status == "ok"] == ["parity", "donation", "teacher"]
    assert checks["accumulation"].fix == "do that"
    assert all(checks[name].fix == MECHANISMS[name] for name in ("replay", "bfloat16"))
    assert "SIGSEGV" in checks["replay"].text and "nothing happened for 4 s" in checks["bfloat16"].text


def test_what_was_not_reached_in_time_has_failed():
    checks, _ = watch("time.sleep(600)", 0, [["parity"], ["teacher"]])
    assert [(check.status, check.text) for check in checks] == [("failed", "the time was over")] * 2


def test_what_was_begun_is_ended_when_nobody_watches(tmp_path):
    script = f"open({str(tmp_path / 'training')!r}, 'w').write(f'{{os.getpid()}} {{sys.argv[1]}}'); tick('parity'); time.sleep(600)"
    checks = Trials(QUICK, command=(sys.executable, "-c", TICK + script)).run()
    assert [next(checks).name for _ in range(2)] == ["runtime", "parity"]
    checks.close()
    process, directory = (tmp_path / "training").read_text().split()
    assert not os.path.exists(f"/proc/{process}")
    assert not os.path.exists(directory)


def run_doctor(*options, **variables):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, timeout=500)


@pytest.mark.slow
def test_this_machine(tmp_path):
    result = run_doctor("--json", str(tmp_path / "found.json"), HF_TPU_EXT_BACKEND="cpu", PYTHONIOENCODING="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "✓ adapter" in result.stdout
    assert result.stdout.endswith("everything passed\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"]
    (names,) = QUICK
    assert tuple(check["name"] for check in found["checks"][-len(names) :]) == names
    assert os.listdir(tmp_path) == ["found.json"]
    alone = run_doctor("--no-smoke", "--json", "-", HF_TPU_EXT_BACKEND="cpu", PYTHONIOENCODING="utf-8")
    assert json.loads(alone.stdout)["ok"] and "✓ backend" in alone.stderr


@pytest.mark.slow
@pytest.mark.parametrize("chips", [1, 4])
def test_this_machine_with_xla(chips):
    result = run_doctor(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(chips), PYTHONIOENCODING="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f"✓ {name}" in result.stdout for names in QUICK for name in names)
    assert f"{chips} chip" in result.stdout


@pytest.mark.ci
def test_a_failure_is_the_status_also_on_a_screen_without_its_marks():
    result = run_doctor("--no_smoke", HF_TPU_EXT_BACKEND="gpu", PYTHONIOENCODING="ascii")
    assert result.returncode == 1, result.stderr
    assert "? backend" in result.stdout
    assert "Unknown HF_TPU_EXT_BACKEND='gpu'" in result.stdout
    assert "fix:" in result.stdout
    assert result.stdout.endswith("1 failed: backend\n")
    assert "smoke training run" not in result.stdout
    assert result.stdout.isascii()


def test_bad_arguments(tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path)]) == 2
    assert "(Is a directory)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--smoke"])
    assert stop.value.code == 2
