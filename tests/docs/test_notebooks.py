"""The notebooks run from top to bottom as they stand, on XLA for the CPU."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
SECONDS_PER_CELL = 1800


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel of this environment, wherever its Jupyter looks for kernels."""
    spec = tmp_path / "jupyter" / "kernels" / "here"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(spec.parents[1]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    return "here"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, kernel, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    if path.stem == "acceptance":
        # Ten minutes are for a chip; a host's cores may be shared.
        (parameters,) = (cell for cell in notebook.cells if cell.metadata.get("tags") == ["parameters"])
        parameters.source = parameters.source.replace("MINUTES = 10", "MINUTES = 30")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=SECONDS_PER_CELL, kernel_name=kernel, resources=resources).execute()
    if path.stem == "acceptance":
        # A command that fails ends no notebook.
        assert "everything passed" in notebook.cells[-1].outputs[0]["text"], notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_as_it_is_pasted(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    titles = [line for text in texts for line in text.splitlines() if line.startswith("#")]
    assert re.match(r"# \w", titles[0]) and all(re.match(r"## \w", title) for title in titles[1:]), titles
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    # A person sets what is to be set in one cell, the first.
    assert [cell.metadata.get("tags") for cell in code].index(["parameters"]) == 0


def test_are_found():
    assert len(NOTEBOOKS) == 9
