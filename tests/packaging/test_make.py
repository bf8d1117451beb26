"""`make` takes the newest Python that runs."""

import shutil
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def make(tmp_path, pythons, *arguments):
    """What `make` says on a machine that has these Pythons, and those of `broken` ones that do not run."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in ("make", "sh", "grep", "awk", "sed", "echo"):
        (directory / tool).symlink_to(shutil.which(tool))
    for name, status in pythons.items():
        (directory / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (directory / name).chmod(0o755)
    return subprocess.run(
        [shutil.which("make"), *arguments, f"VENV={tmp_path}/env"],
        cwd=ROOT,
        env={"PATH": str(directory)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3.11": 0, "python3.12": 0, "python3.13": 0}, "python3.12"),
        # As a shim of pyenv, of a version that is not chosen.
        ({"python3.11": 0, "python3.12": 127}, "python3.11"),
    ],
)
def test_takes_the_newest_that_runs(tmp_path, pythons, taken):
    done = make(tmp_path, pythons, "--dry-run", "setup")
    assert f"{taken} -m venv" in done.stdout, done.stderr


def test_says_what_is_missing(tmp_path):
    done = make(tmp_path, {"python3.10": 0}, "setup")
    assert done.returncode != 0
    assert "No Python 3.12 or 3.11 is installed here" in done.stdout
