"""Which accelerator is chosen where torch_tpu is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_tpu_ext.backends import select_backend, selection
from hf_tpu_ext.backends.selection import prepare_processes
from hf_tpu_ext.backends.torch_tpu.backend import TorchTPUBackend
from hf_tpu_ext.trainers.checks.field_answers import Place
from hf_tpu_ext.trainers.checks.fields import adapt


@pytest.fixture
def fresh(monkeypatch):
    """A process that has chosen nothing yet."""
    monkeypatch.setattr(selection, "_backends", {})
    monkeypatch.delenv("HF_TPU_EXT_BACKEND", raising=False)
    return monkeypatch


def test_auto_takes_its_device(fresh):
    backend = select_backend()
    assert (backend.name, str(backend.device), backend.reason) == ("tpu", "tpu:0", "torch_tpu has a device")


def test_an_explicit_choice(fresh):
    assert select_backend("tpu").reason == "backend='tpu' was asked for"
    assert select_backend("cpu").name == "cpu"
    with pytest.raises(ValueError, match=r"backend='xla' needs torch_xla, which is not installed"):
        select_backend("xla")


def test_several_chips_are_several_processes(fresh):
    with pytest.raises(
        ValueError, match=r"num_chips=4, .* each process drives one chip, and here is 1. Start .* by hf-tpu"
    ):
        select_backend("tpu", 4)
    fresh.setenv("WORLD_SIZE", "4")
    assert select_backend("tpu", 4).name == "tpu"


def test_how_many_processes_a_run_has(fresh):
    tpu = select_backend("tpu")
    assert prepare_processes(tpu, None) == 1
    fresh.setattr(TorchTPUBackend, "chips_of_host", 4)
    assert [prepare_processes(tpu, chips) for chips in (None, 2, 1)] == [4, 2, 1]
    assert prepare_processes(select_backend("cpu"), None) == 1
    fresh.setenv("TPU_NUM_DEVICES", "8")
    with pytest.raises(ValueError, match="TPU_NUM_DEVICES=8, but this machine has 4 chips"):
        prepare_processes(tpu, None)


def test_processes_without_what_connects_their_chips_are_told_what_to_type(fresh):
    """By a launcher that knows nothing of torch_tpu, on chips."""
    fresh.setenv("WORLD_SIZE", "2")
    fresh.delenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", raising=False)
    backend = TorchTPUBackend("")
    backend._on_chip = True
    with pytest.raises(ValueError, match="A launcher has started 2 processes without .* by hf-tpu"):
        assert backend.processes


def run(script, **env):
    caches = ("HF_TPU_EXT_COMPILE_CACHE", "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT")
    names = ("TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH", "HF_TPU_EXT_BACKEND", *caches)
    return subprocess.run(
        [sys.executable, "-c", script],
        env={name: value for name, value in os.environ.items() if name not in names} | env,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )


def test_without_a_chip_it_is_no_device_and_the_cpu_is_used():
    result = run("from hf_tpu_ext.backends import select_backend; print(select_backend().name); select_backend('tpu')")
    assert result.stdout == "cpu\n"
    assert "backend='tpu' was asked for, but torch_tpu has no device in this process" in result.stderr


def test_the_first_backward_pass_on_the_cpu_does_not_ask_google_cloud():
    """By the hook that PyTorch calls in every process, and without it when a backend is chosen."""
    backward = "x = torch.ones(2, requires_grad=True); x.sum().backward(); print(os.environ['TPU_SKIP_MDS_QUERY'])"
    assert run(f"import os, torch; {backward}").stdout == "1\n"
    chosen = "import os, torch; from hf_tpu_ext.backends import select_backend; select_backend()"
    assert run(f"{chosen}; {backward}", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout == "1\n"


def test_a_plan_is_made_where_torch_xla_is(fresh, capsys):
    from hf_tpu_ext.cli.main import main

    assert main(["plan", "--seq_lengths", "64", "--model_name_or_path", "tiny"]) == 2
    told = capsys.readouterr().err
    assert "needs torch_xla" in told and "in an environment of its own, beside that of torch_tpu" in told


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(mesh="data=1,fsdp=2"), "mesh='data=1,fsdp=2' is for 2 chips, not 1"),
        (dict(mesh="data=2"), "mesh='data=2' is for 2 chips, not 1"),
        (dict(fsdp="full_shard"), "fsdp=.* Leave it out, and set mesh='fsdp'"),
        (dict(rematerialization="dots"), "rematerialization='dots' does not work with torch_tpu"),
        (dict(attention="splash"), "attention='splash' does not work with torch_tpu"),
        (dict(fp16=True), "fp16=True does not work"),
        (dict(max_length=None), "max_length=None does not work"),
        (dict(optim="lion_8bit"), "optim=lion_8bit does not run"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(runs, config, words):
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    with pytest.raises(ValueError, match=words):
        runs.trainer(TPUSFTTrainer, runs.config(TPUSFTConfig, **config))


@pytest.mark.parametrize("setting", [{"even_batches": False}, {"dispatch_batches": True}, {"split_batches": True}])
def test_processes_that_would_not_take_as_many_batches_are_refused(runs, setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"accelerator_config has {name}="):
        adapt(runs.config(accelerator_config=setting), Place("tpu", traces_steps=False, processes=2))


def test_programs_on_disk_are_loaded_by_the_next_process(runs, tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import cpu_plugin
cpu_plugin.start()
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
trainer = TPUSFTTrainer(
    AutoModelForCausalLM.from_pretrained({str(runs.model_dir)!r}),
    TPUSFTConfig({str(tmp_path / "run")!r}, compile_cache_dir={str(tmp_path / "cache")!r}, gradient_checkpointing=False,
                 max_steps=5, max_length=32, bf16=False, save_strategy="no", report_to="none", run_report=False),
    processing_class=AutoTokenizer.from_pretrained({str(runs.model_dir)!r}),
    train_dataset=Dataset.from_list([{{"prompt": "abcabc", "completion": "cba"}}] * 16),
)
trainer.train()
counted = trainer.backend.counters()
print(counted.compiles, counted.loads)
"""
    # torch_tpu keeps programs in memory as well, for all processes of the machine, by the name of this variable.
    name = tmp_path.parent.name
    env = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "TORCH_TPU_TIER2_COMPILATION_CACHE": name}
    try:
        (first, _), (nothing, loaded) = (run(script, **env).stdout.split()[-2:] for _ in range(2))
    finally:
        shutil.rmtree(f"/dev/shm/torch_tpu_cache/{name}", ignore_errors=True)
    assert int(first) > 0
    assert nothing == "0" and int(loaded) > 0
    assert list((tmp_path / "cache").rglob("*.bin"))
