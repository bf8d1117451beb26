"""The wheel in a new environment, which has the packages of this one but not this package's clone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run(*command, cwd, **environment):
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PJRT_DEVICE": "CPU"} | environment,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    # From a copy: a build leaves files behind.
    clone = directory / "clone"
    run("git", "clone", "--quiet", ROOT, clone, cwd=directory)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, clone, cwd=directory)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture
def environment(tmp_path):
    """A new environment without this package. The path of its Python."""
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # All but the clone, which is not where packages are.
    shared = tmp_path / "shared"
    shared.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "hf_tpu_ext" not in entry.name and entry.suffix != ".pth":
            (shared / entry.name).symlink_to(entry)
    Path(purelib, "shared.pth").write_text(f"{shared}\n")
    return python


def hf_tpu(python, *arguments, cwd):
    return run(python, "-m", "hf_tpu_ext.cli.main", *arguments, cwd=cwd)


def test_a_recipe_is_written_trained_resumed_and_exported(wheel, environment, tmp_path):
    run(environment, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    place = run(environment, "-c", "import hf_tpu_ext; print(hf_tpu_ext.__file__)", cwd=tmp_path)
    assert place.startswith(str(tmp_path))
    assert "sft_lora_qwen3" in hf_tpu(environment, "recipes", cwd=tmp_path)
    assert "Wrote recipes/sft_lora_qwen3.yaml" in hf_tpu(environment, "init", "sft", cwd=tmp_path)
    hf_tpu(environment, "prepare", "tiny", "--output_dir", ".cache/tiny", cwd=tmp_path)
    train = ("sft", "--config", "recipes/sft_lora_qwen3.yaml", "--smoke", "--output_dir", "runs/first")
    hf_tpu(environment, *train, "--save_strategy", "steps", "--save_steps", "2", cwd=tmp_path)
    checkpoint = "runs/first/checkpoint-2"
    resumed = hf_tpu(environment, *train, "--resume_from_checkpoint", checkpoint, cwd=tmp_path)
    assert "resumed after step 2" in resumed
    hf_tpu(environment, "export", "runs/first", "--merge", cwd=tmp_path)
    assert list(tmp_path.glob("runs/first*/**/model.safetensors"))


@pytest.mark.parametrize("origin", ["wheel", "index"])
def test_messages_name_what_it_came_from(origin, wheel, environment, tmp_path):
    what = {"wheel": [wheel], "index": ["hf_tpu_ext", "--no-index", "--find-links", wheel.parent]}[origin]
    run(environment, "-m", "pip", "install", "--quiet", *what, cwd=tmp_path)
    script = "from hf_tpu_ext.installing import install_command as c; print(c('plan'))"
    command = run(environment, "-c", script, cwd=tmp_path).strip()
    assert command == f"pip install '{wheel if origin == 'wheel' else 'hf_tpu_ext'}[plan]'"
    # And it works.
    pip = f"{environment} -m {command} --quiet --no-index --find-links {wheel.parent}"
    run("sh", "-c", pip, cwd=tmp_path)


@pytest.mark.parametrize("origin", ["wheel", "index"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cells_of_notebooks_install(path, origin, wheel, environment, tmp_path, monkeypatch):
    spec = tmp_path / "jupyter" / "kernels" / "there"
    spec.mkdir(parents=True)
    argv = [str(environment), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "there", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(spec.parents[1]))
    place = tmp_path / "place"
    place.mkdir()
    if origin == "wheel":
        shutil.copy(wheel, place)
    else:
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    check = nbformat.v4.new_code_cell("import hf_tpu_ext\nprint(hf_tpu_ext.__file__)")
    notebook.cells = [*code[:2], check]
    NotebookClient(notebook, timeout=300, kernel_name="there", resources={"metadata": {"path": str(place)}}).execute()
    assert str(environment.parents[1]) in check.outputs[0]["text"]


def test_a_script_beside_a_clone_finds_the_package(environment, tmp_path):
    """A directory of the package's name, which the clone is, is found before an editable package that is not on the path."""
    run("git", "clone", "--quiet", ROOT, tmp_path / "hf_tpu_ext", cwd=tmp_path)
    run(environment, "-m", "pip", "install", "--quiet", "--no-deps", "-e", tmp_path / "hf_tpu_ext", cwd=tmp_path)
    found = run(environment, "-c", "import hf_tpu_ext; print(hf_tpu_ext.__file__)", cwd=tmp_path, PYTHONPATH="")
    assert found.strip() == str(tmp_path / "hf_tpu_ext" / "hf_tpu_ext" / "__init__.py")
