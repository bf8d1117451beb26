"""Tests of torch_tpu, which runs on the host here, in an environment of its own: `make test-torch-tpu`."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cpu_plugin
import pytest


WHY_ABSENT = cpu_plugin.why_absent()

# The tiny model, data and runs of `tests/trainers`.
_spec = importlib.util.spec_from_file_location(
    "trainers_conftest", Path(__file__).parents[1] / "trainers" / "conftest.py"
)
trainers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(trainers)
runs, same_logs, as_trainer = trainers.runs, trainers.same_logs, trainers.as_trainer
# Where a step is not compiled whole, each layer is a program.
tiny_model = trainers.two_layer_model


def pytest_collection_modifyitems(items):
    for item in items:
        if WHY_ABSENT is not None and Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=WHY_ABSENT))


@pytest.fixture(scope="session")
def shared():
    return trainers


@pytest.fixture(scope="session")
def tpu(xla):
    """The backend."""
    assert xla.name == "tpu"
    return xla


@pytest.fixture
def stock_of_ranks(runs):
    """Upstream's trainer on eager CPU, with the rows of several processes. Nothing is saved."""
    from ranks_data import evaluated_rows

    runs.train_dataset, runs.eval_dataset = trainers.make_rows(24), evaluated_rows()
    ours = "length_buckets mesh compile_step stop_at metrics save_strategy save_steps load_best_model_at_end".split()

    def train(count=2, **config):
        for name in ours:
            config.pop(name, None)
        for name, rows in {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}.items():
            config[name] = count * config.get(name, rows)
        return runs.stock(**config)

    return train


@pytest.fixture
def ours(noted, as_trainer):
    """What the processes of the test file's `noted` noted of a training, as a trainer has it."""
    return lambda name: as_trainer(noted[1][0][name]["log"])


@pytest.fixture
def hf_tpu(tpu, tmp_path):
    """
    Runs `hf-tpu` in a process of its own, on a machine that is said to have some chips, and returns what it has come to. The
    processes of a test share programs.
    """
    here = Path(__file__).parent
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
sys.path.insert(0, {str(here)!r})
if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    import cpu_plugin
    cpu_plugin.start()
    from hf_tpu_ext.backends.torch_tpu.backend import TorchTPUBackend
    TorchTPUBackend.chips_of_host = int(os.environ["CHIPS"])
""")
    # torch_tpu keeps programs in memory as well, for all processes of the machine, by the name of this variable.
    shared = f"{tmp_path.parent.name}-{tmp_path.name}"
    env = {"TORCH_TPU_TIER2_COMPILATION_CACHE": shared, "TORCH_TPU_LAUNCH_BLOCKING": "1"}

    def run(*argv, chips=1, status=0):
        result = subprocess.run(
            [sys.executable, "-m", "hf_tpu_ext.cli.main", *map(str, argv)],
            env={
                **os.environ,
                **env,
                "CHIPS": str(chips),
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(here.parents[1])]),
            },
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
        )
        assert result.returncode == status, result.stderr[-3000:]
        return result

    yield run
    shutil.rmtree(f"/dev/shm/torch_tpu_cache/{shared}", ignore_errors=True)
