"""A forked process does what a new one does with the same command."""

import os
import signal
import subprocess
import sys

import forked
import pytest


PROGRAMS = {
    "ends": "print('printed')",
    "status": "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(300)",
    "words": "raise SystemExit('what was wrong')",
    "error": "import threading; threading.Timer(0.1, print, ['of a thread']).start(); {}['key']",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "given": "import os, sys; print(sys.argv, sys.path[0], sys.stdin.read(), os.getcwd(), os.environ['OF_TEST'], __name__)",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("how", ["file", "-c", "-m"])
def test_same_status_and_output(name, how, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[name])
    words = {"file": [file], "-c": ["-c", PROGRAMS[name]], "-m": ["-m", "program"]}[how]
    given = {"input": "read", "cwd": tmp_path, "env": {**os.environ, "OF_TEST": name}}
    given |= {"capture_output": True, "text": True}
    found, expected = (module.run([sys.executable, *words, "a"], **given) for module in (forked, subprocess))
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_a_running_process_can_be_stopped():
    with forked.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
