"""What the package does at the end of `import torch`: nothing, except in the processes that ask for it."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from hf_tpu_ext.backends import detect
from hf_tpu_ext.cli import autoload, swap


STATE = """
import json, os, sys, torch
modules = [name for name in sys.modules if not name.startswith(("hf_tpu_ext", "__editable__"))]
finders = [str(finder).split(" at ")[0] for finder in sys.meta_path]
print(json.dumps([sorted(modules), dict(os.environ), finders, sys.path]))
"""


def run_process(*command, env=None, cwd=None):
    env = {name: value for name, value in os.environ.items() if name != "HF_TPU_EXT"} | (env or {})
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)


def trl(*args, env=None):
    return run_process(shutil.which("trl", path=os.path.dirname(sys.executable)), *args, env=env)


@pytest.mark.ci
def test_other_processes_are_left_as_they_are():
    with_autoload = run_process(sys.executable, "-c", STATE)
    without = run_process(sys.executable, "-c", STATE, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert with_autoload.stderr == without.stderr
    modules, environment, finders, path = json.loads(with_autoload.stdout)
    stock_modules, stock_environment, stock_finders, stock_path = json.loads(without.stdout)
    stock_environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
    assert set(modules) == set(stock_modules)
    assert environment == stock_environment
    assert finders == stock_finders
    assert path == stock_path


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/venv/bin/trl", "sft", "--config", "r.yaml"], True),
        (["/venv/lib/trl/cli/main.py", "sft"], True),
        (["/venv/bin/trl", "dpo", "--config", "r.yaml"], True),
        (["/venv/bin/trl", "reward"], True),
        (["/venv/bin/trl", "kto"], True),
        (["/venv/bin/trl", "grpo"], True),
        (["/venv/bin/trl", "rloo"], True),
        (["/venv/bin/trl", "distillation"], True),
        (["/venv/bin/trl", "env"], False),
        (["/venv/bin/trl"], False),
        (["/venv/lib/trl/scripts/sft.py", "sft"], False),
        (["-c"], False),
        ([], False),
    ],
)
def test_which_commands_of_trl_are_replaced(argv, expected):
    assert autoload._is_trl_training(argv) is expected


@pytest.mark.parametrize(
    ("switch", "in_recipe", "chips", "expected"),
    [
        ("", "", 0, None),
        ("", "", 4, "this machine has a TPU"),
        ("1", "", 0, "HF_TPU_EXT=1 is set"),
        ("", "HF_TPU_EXT: 1", 0, "the recipe's env says HF_TPU_EXT: 1"),
        ("", "HF_TPU_EXT: true", 0, "the recipe's env says HF_TPU_EXT: true"),
        ("y", "", 0, "HF_TPU_EXT=y is set"),
        ("", "HF_TPU_EXT: 0", 4, None),
        ("", "HF_TPU_EXT: n", 4, None),
        ("1", "HF_TPU_EXT: 0", 4, None),
        ("1", "PJRT_DEVICE: CPU", 0, "HF_TPU_EXT=1 is set"),
        # The device would not be the TPU.
        ("", "PJRT_DEVICE: CPU", 4, None),
        ("", "HF_TPU_EXT_BACKEND: cpu", 4, None),
        ("", "HF_TPU_EXT_BACKEND: xla", 4, "this machine has a TPU"),
        ("", "USE_TORCH_XLA: 0", 4, None),
        ("", "ACCELERATE_USE_CPU: true", 4, None),
        # Which a backend that is asked for does not mind.
        ("", "HF_TPU_EXT_BACKEND: xla, ACCELERATE_USE_CPU: true", 4, "this machine has a TPU"),
        ("", "HF_TPU_EXT_BACKEND: xla, USE_TORCH_XLA: 0", 4, "this machine has a TPU"),
        ("", "HF_TPU_EXT_BACKEND: xla, PJRT_DEVICE: CPU", 4, None),
    ],
)
@pytest.mark.parametrize("option", [["--config", "{}"], ["--config={}"]])
def test_when_trl_is_replaced(switch, in_recipe, chips, expected, option, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env: {{{in_recipe}}}\nmax_steps: 1\n")
    monkeypatch.setattr(detect, "tpu_chips", lambda: chips)
    monkeypatch.delenv("PJRT_DEVICE")
    argv = [part.format(recipe) for part in option]
    assert autoload._reason_to_replace(switch, argv) == expected


def test_torch_tpu_is_chosen_whatever_pjrt_device_says(monkeypatch):
    monkeypatch.setattr(detect, "tpu_chips", lambda: 4)
    monkeypatch.setattr(detect, "has_torch_tpu", lambda: True)
    assert detect.would_use_tpu(None, {"PJRT_DEVICE": "CPU"})
    assert not detect.would_use_tpu("xla", {"PJRT_DEVICE": "CPU"})


@pytest.mark.parametrize("argv", [["--use_cpu"], ["--use-cpu=true"], ["--backend", "cpu"], ["--cpu"]])
def test_trl_is_not_replaced_on_a_machine_with_a_tpu_that_is_not_used(argv, monkeypatch):
    monkeypatch.setattr(detect, "tpu_chips", lambda: 4)
    monkeypatch.delenv("PJRT_DEVICE")
    assert autoload._reason_to_replace("", argv) is None
    assert autoload._reason_to_replace("", ["--max_steps", "1"]) == "this machine has a TPU"


def test_an_error_here_does_not_break_the_import_of_torch(monkeypatch, capsys):
    def fail():
        raise RuntimeError("not even this")

    monkeypatch.setattr(detect, "remember_pjrt_device", fail)
    autoload.autoload()
    line = capsys.readouterr().err
    assert line.startswith(
        "hf_tpu_ext does nothing in this process, because of an error of its own (RuntimeError: not"
    )


def test_unreadable_recipe_is_left_to_the_command_that_runs(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("env: [")
    assert autoload._reason_to_replace("", ["--config", str(broken)]) is None
    assert autoload._reason_to_replace("1", ["--config", str(broken)]) == "HF_TPU_EXT=1 is set"
    assert autoload._reason_to_replace("", ["--config", str(tmp_path / "absent.yaml")]) is None


@pytest.mark.parametrize("value", ["on please", "2", "None"])
def test_a_value_that_means_nothing_is_told(value, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env:\n  HF_TPU_EXT: {value}\n")
    monkeypatch.setattr(detect, "tpu_chips", lambda: 0)
    assert autoload._reason_to_replace("", ["--config", str(recipe)]) is None
    allowed = "has no effect. Allowed: 1, on, t, true, y, yes; 0, f, false, n, no, off."
    assert capsys.readouterr().err == f"hf_tpu_ext: HF_TPU_EXT={value.lower()!r} in the recipe's env {allowed}\n"
    monkeypatch.setenv("HF_TPU_EXT", value)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    finders = list(sys.meta_path)
    autoload.autoload()
    assert sys.meta_path == finders
    assert capsys.readouterr().err == f"hf_tpu_ext: HF_TPU_EXT={value.lower()!r} in the environment {allowed}\n"


def test_the_child_of_a_stock_command_is_stock(monkeypatch):
    """In whose environment `trl` puts what the recipe says."""
    monkeypatch.setenv("_HF_TPU_EXT_STOCK", "")
    monkeypatch.delenv("_HF_TPU_EXT_STOCK")
    finders = list(sys.meta_path)
    for switch, argv in (("0", ["trl", "sft", "--config", "recipe.yaml"]), ("1", ["trl/scripts/sft.py"])):
        monkeypatch.setenv("HF_TPU_EXT", switch)
        monkeypatch.setattr(sys, "argv", argv)
        autoload.act()
    assert sys.meta_path == finders


@pytest.mark.slow
def test_variable_of_the_process_switches_off(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env:\n  HF_TPU_EXT: 1\n")
    stock = trl("sft", "--config", str(recipe), "--help", env={"HF_TPU_EXT": "0"})
    assert stock.returncode == 0
    assert stock.stdout.startswith("usage: trl sft")
    assert "hf_tpu_ext" not in stock.stdout + stock.stderr


@pytest.mark.slow
def test_stock_command_with_an_unknown_key(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env:\n  HF_TPU_EXT: 1\nlerning_rate: 1.0e-4\n")
    result = trl("sft", "--config", str(recipe))
    assert result.returncode == 2
    assert f"unknown key 'lerning_rate' in {recipe}. Did you mean 'learning_rate'?" in result.stderr
    assert "because the recipe's env says HF_TPU_EXT: 1; HF_TPU_EXT=0 runs the stock command." in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("switch", "finders"), [("0", 0), ("", 0), ("1", 1)])
def test_scripts_are_watched_only_if_they_ask(switch, finders, monkeypatch):
    monkeypatch.setenv("HF_TPU_EXT", switch)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # Modules of this process are left as they are.
    monkeypatch.setattr(swap, "_REPLACED", {})
    monkeypatch.setattr(swap, "_TRAINER_MODULE", "absent")
    before = len(sys.meta_path)
    autoload.autoload()
    assert len(sys.meta_path) == before + finders
