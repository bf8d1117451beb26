"""Each command of the workflows runs in a clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
# PyYAML reads the key `on` as true.
ON = True
STEPS = [
    (name, job_name, step["run"])
    for name, workflow in WORKFLOWS.items()
    for job_name, job in workflow["jobs"].items()
    for step in job["steps"]
    if "run" in step
]
# The Makefile stands for them: they would run these tests again. Here it is asked what it would do.
DRY = (
    "make test",
    "make test-ci",
    "make test-torch-tpu",
    "make test-at-newest",
    "make test-bounds",
    *(f"make test-torch-at-{bound}" for bound in ("lowest", "newest")),
)


def test_every_workflow_has_a_trigger_and_an_end():
    assert set(WORKFLOWS) == {"tests", "docs", "wheel", "upstream"}
    for workflow in WORKFLOWS.values():
        assert workflow[ON]
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_issue_templates_ask_for_the_doctor():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        asked = [field for field in template["body"] if field["attributes"]["label"].startswith("hf-tpu doctor")]
        assert asked and "--json doctor.json" in asked[0]["attributes"]["description"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("workflows") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(directory)], check=True)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "job", "command"), STEPS, ids=[f"{step[0]}-{step[1]}-{step[2][:24]}" for step in STEPS]
)
def test_each_command_runs(workflow, job, command, clone):
    # `python` of the workflow is that of setup-python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if command.split(" PYTHON=")[0] in DRY:
        command = command.replace("make ", "make --dry-run ", 1)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command],
        cwd=clone,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
