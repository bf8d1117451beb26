"""Which accelerator is chosen, and that choosing it starts nothing."""

import os
import subprocess
import sys
from types import SimpleNamespace

import forked
import pytest
import torch

from hf_tpu_ext.backends import detect, select_backend, selection, tpu_chips
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.installing import install_command


def run_script(script, *argv, run=subprocess.run, **env):
    """Run a script in a process of its own, which starts with none of the variables that a choice depends on."""
    chosen_by = (
        "PJRT_DEVICE",
        "HF_TPU_EXT_BACKEND",
        "USE_TORCH_XLA",
        "XLA_USE_BF16",
        "TPU_VISIBLE_CHIPS",
        "TPU_NUM_DEVICES",
        "CPU_NUM_DEVICES",
    )
    env = {name: value for name, value in os.environ.items() if name not in chosen_by} | env
    result = run([sys.executable, "-c", script, *map(str, argv)], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def fresh(monkeypatch):
    """A process that has chosen nothing yet, with none of the variables set."""
    monkeypatch.setattr(selection, "_backends", {})
    monkeypatch.setattr(detect, "_pjrt_device_before_torch_xla", [None])
    for name in ("PJRT_DEVICE", "HF_TPU_EXT_BACKEND", "USE_TORCH_XLA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# ---- What is here ----


def add_pci_device(root, name, vendor, device):
    (root / name).mkdir()
    (root / name / "vendor").write_text(f"{vendor}\n")
    (root / name / "device").write_text(f"{device}\n")


def test_chips_are_counted_by_their_pci_ids(tmp_path):
    assert tpu_chips(str(tmp_path)) == 0
    add_pci_device(tmp_path, "0000:00:01.0", "0x1ae0", "0x0042")  # Google's network card
    add_pci_device(tmp_path, "0000:00:02.0", "0x8086", "0x0063")  # another vendor's device of the same id
    assert tpu_chips(str(tmp_path)) == 0
    for slot in range(4, 8):
        add_pci_device(tmp_path, f"0000:00:0{slot}.0", "0x1ae0", "0x0063")
    assert tpu_chips(str(tmp_path)) == 4
    assert tpu_chips(str(tmp_path / "absent")) == 0


@pytest.mark.parametrize(
    ("pjrt_device", "env", "chips", "expected"),
    [
        ("TPU", {}, 8, 8),
        ("TPU", {"TPU_VISIBLE_CHIPS": "0,1"}, 8, 2),
        ("TPU", {}, 0, 1),
        ("CPU", {}, 8, 1),
        ("CPU", {"CPU_NUM_DEVICES": "3"}, 0, 3),
    ],
)
def test_local_chips(pjrt_device, env, chips, expected, monkeypatch):
    for name in ("TPU_VISIBLE_CHIPS", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(detect, "tpu_chips", lambda: chips)
    assert detect.local_chips(pjrt_device) == expected


@pytest.mark.parametrize("value", ["eight", "0", "-1", ""])
def test_devices_of_the_host_that_are_no_number(value, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", value)
    with pytest.raises(ValueError) as error:
        detect.local_chips("CPU")
    assert f"CPU_NUM_DEVICES={value!r}" in str(error.value) and "CPU_NUM_DEVICES=8" in str(error.value)


@pytest.fixture
def chip_variables(monkeypatch):
    """None of the variables that say which chips a process sees is set; afterwards all are as before."""
    names = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "CPU_NUM_DEVICES")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize(
    ("num_chips", "visible", "bounds"), [(1, "0", "1,1,1"), (2, "0,1", "1,2,1"), (4, "0,1,2,3", "2,2,1")]
)
def test_a_part_of_a_tpu_host(num_chips, visible, bounds, chip_variables):
    detect.show_chips("TPU", num_chips, all_chips=8)
    assert chip_variables() == {
        "TPU_VISIBLE_CHIPS": visible,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    assert detect.local_chips("TPU") == num_chips


@pytest.mark.parametrize("all_chips", [1, 4, 8])
def test_a_whole_tpu_host_is_left_as_it_is(all_chips, chip_variables):
    detect.show_chips("TPU", all_chips, all_chips)
    assert chip_variables() == {}


@pytest.mark.parametrize(("num_chips", "shown"), [(1, "4"), (2, "4,5"), (4, "4,5,6,7")])
def test_chips_that_are_visible_already_are_cut(num_chips, shown, chip_variables, monkeypatch):
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "4,5,6,7")
    detect.show_chips("TPU", num_chips, all_chips=4)
    assert chip_variables()["TPU_VISIBLE_CHIPS"] == shown


@pytest.mark.parametrize(
    ("num_chips", "all_chips", "allowed"), [(3, 8, "1, 2, 4, 8"), (6, 8, "1, 2, 4, 8"), (3, 4, "1, 2, 4")]
)
def test_chips_that_are_no_rectangle(num_chips, all_chips, allowed, chip_variables):
    with pytest.raises(ValueError) as error:
        detect.show_chips("TPU", num_chips, all_chips)
    assert f"num_chips={num_chips}:" in str(error.value) and f"one of {allowed}." in str(error.value)
    assert chip_variables() == {}


@pytest.mark.parametrize("num_chips", [1, 3, 8])
def test_a_part_of_the_devices_of_the_host(num_chips, chip_variables):
    detect.show_chips("CPU", num_chips, all_chips=8)
    assert chip_variables() == {"CPU_NUM_DEVICES": str(num_chips)}
    assert detect.local_chips("CPU") == num_chips


@pytest.mark.parametrize(
    ("imported", "before", "now", "expected"),
    [
        (False, [None], None, None),
        (False, [None], "CPU", "CPU"),  # set after `import torch`: nobody else can have set it
        (True, [None], "CPU", None),  # set by torch_xla's own import
        (True, ["CPU"], "CPU", "CPU"),
        (True, ["TPU"], "TPU", "TPU"),
        (True, [], "CPU", "CPU"),  # torch_xla came before anything of ours: the variable is all there is
    ],
)
def test_who_set_pjrt_device(imported, before, now, expected, fresh):
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", before)
    fresh.delitem(sys.modules, "torch_xla", raising=False)
    if imported:
        fresh.setitem(sys.modules, "torch_xla", SimpleNamespace())
    if now:
        fresh.setenv("PJRT_DEVICE", now)
    assert detect.pjrt_device_asked_for() == expected


def test_the_first_note_of_pjrt_device_counts(fresh):
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", [])
    fresh.delitem(sys.modules, "torch_xla", raising=False)
    fresh.setenv("PJRT_DEVICE", "TPU")
    detect.remember_pjrt_device()
    fresh.setenv("PJRT_DEVICE", "CPU")
    detect.remember_pjrt_device()
    assert detect._pjrt_device_before_torch_xla == ["TPU"]


def test_nothing_is_noted_once_torch_xla_has_set_the_variable(fresh):
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", [])
    fresh.setitem(sys.modules, "torch_xla", SimpleNamespace())
    fresh.setenv("PJRT_DEVICE", "CPU")
    detect.remember_pjrt_device()
    assert detect._pjrt_device_before_torch_xla == []


# ---- What is chosen ----


@pytest.mark.parametrize(
    ("chips", "torch_xla", "env", "cuda", "expected", "reason"),
    [
        (0, True, {}, False, "cpu", "PJRT_DEVICE=CPU would compile with XLA for this CPU"),
        (0, False, {}, False, "cpu", "no TPU or GPU found"),
        (0, True, {}, True, "cuda", "CUDA is available"),
        (0, True, {"PJRT_DEVICE": "CPU"}, False, "xla CPU", "PJRT_DEVICE=CPU is set"),
        (0, True, {"PJRT_DEVICE": "CPU"}, True, "xla CPU", "PJRT_DEVICE=CPU is set"),
        (0, True, {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "0"}, False, "cpu", "no TPU or GPU found"),
        (0, True, {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "false"}, True, "cuda", "CUDA is available"),
        (0, True, {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}, False, "xla CPU", "PJRT_DEVICE=CPU is set"),
        (
            0,
            False,
            {"PJRT_DEVICE": "CPU"},
            False,
            "cpu",
            f"torch_xla, which is not installed: {install_command('tpu')}",
        ),
        (4, True, {}, False, "xla TPU", "4 TPU chips found"),
        (1, True, {}, True, "xla TPU", "1 TPU chip found"),
        (4, True, {"PJRT_DEVICE": "TPU"}, False, "xla TPU", "4 TPU chips found"),
        (4, True, {"PJRT_DEVICE": "CPU"}, False, "xla CPU", "PJRT_DEVICE=CPU is set"),
        (4, True, {"USE_TORCH_XLA": "0"}, False, "cpu", "unset USE_TORCH_XLA"),
        (4, False, {}, False, "cpu", install_command("tpu")),
        (4, False, {}, True, "cuda", "CUDA is available"),
    ],
)
def test_auto(chips, torch_xla, env, cuda, expected, reason, fresh):
    for name, value in env.items():
        fresh.setenv(name, value)
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", [env.get("PJRT_DEVICE")])
    fresh.setattr(selection, "tpu_chips", lambda: chips)
    fresh.setattr(selection, "has_torch_xla", lambda: torch_xla)
    fresh.setattr(torch.cuda, "is_available", lambda: cuda)
    # A backend for a TPU cannot be made in a process whose runtime holds the host.
    fresh.setattr(
        selection, "_xla", lambda pjrt, reason: SimpleNamespace(name=f"xla {pjrt}", device=None, reason=reason)
    )
    backend = selection._choose()
    assert backend.name == expected
    assert reason in backend.reason


def test_cuda_is_used_on_a_cuda_machine_with_torch_xla(fresh, xla):
    import accelerate.utils
    import transformers.utils
    from transformers import training_args

    def upstream_check():
        return True

    fresh.setattr(training_args, "is_torch_bf16_gpu_available", upstream_check)
    fresh.setattr(torch.cuda, "is_available", lambda: True)
    assert "torch_xla" in sys.modules
    assert select_backend().name == "cuda"
    assert not transformers.utils.is_torch_xla_available()
    assert not accelerate.utils.is_torch_xla_available()
    # What a GPU can compute in is upstream's to say.
    assert training_args.is_torch_bf16_gpu_available is upstream_check


def test_the_variable_counts_where_nothing_is_asked_for(fresh, xla):
    fresh.setenv("HF_TPU_EXT_BACKEND", "xla")
    assert select_backend().name == "xla"
    assert select_backend("auto").name == "xla"
    assert select_backend("cpu").name == "cpu"
    fresh.setenv("HF_TPU_EXT_BACKEND", "cpu")
    assert select_backend().name == "cpu"
    assert select_backend("xla").name == "xla"


def test_a_choice_stands_and_an_explicit_one_does_not_replace_it(fresh, xla):
    """`use_cpu=True` in one config of a process says nothing about the others."""
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", ["CPU"])
    automatic = select_backend()
    assert automatic.name == "xla"
    explicit = select_backend("cpu")
    assert explicit.name == "cpu"
    assert select_backend("cpu") is explicit
    assert select_backend() is automatic


@pytest.mark.parametrize(
    ("prepare", "asked", "words"),
    [
        (lambda patch: None, "gpu", ["'gpu'", "auto, tpu, xla, cuda, cpu"]),
        (
            lambda patch: patch.setattr(selection, "has_torch_tpu", lambda: False),
            "tpu",
            ["backend='tpu'", install_command("torch_tpu"), "torch_xla is backend='xla'"],
        ),
        (
            lambda patch: patch.setenv("HF_TPU_EXT_BACKEND", "gpu"),
            None,
            ["HF_TPU_EXT_BACKEND='gpu'", "auto, tpu, xla, cuda, cpu"],
        ),
        (
            lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False),
            "cuda",
            ["backend='cuda'", "'auto'", "'cpu'"],
        ),
        (
            lambda patch: patch.setattr(selection, "has_torch_xla", lambda: False),
            "xla",
            ["backend='xla'", install_command("tpu")],
        ),
        (
            lambda patch: patch.setattr(detect, "_pjrt_device_before_torch_xla", ["TPU"]),
            "xla",
            ["PJRT_DEVICE=TPU", "no TPU", "PJRT_DEVICE=CPU", "unset PJRT_DEVICE"],
        ),
        (
            lambda patch: patch.setattr(detect, "_pjrt_device_before_torch_xla", ["TPU"]),
            "auto",
            ["PJRT_DEVICE=TPU", "no TPU", "PJRT_DEVICE=CPU", "unset PJRT_DEVICE"],
        ),
        *(
            (
                lambda patch, name=name: patch.setattr(detect, "_pjrt_device_before_torch_xla", [name]),
                asked,
                [f"PJRT_DEVICE={name!r}", "TPU, CPU", "PJRT_DEVICE=CPU", "unset PJRT_DEVICE"],
            )
            for name in ("TPUU", "cpu", "CUDA")
            for asked in ("auto", "xla")
        ),
    ],
)
def test_what_is_absent_is_an_error_that_says_what_to_type(prepare, asked, words, fresh, xla):
    prepare(fresh)
    with pytest.raises(ValueError) as error:
        select_backend(asked)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("pjrt_device", ["TPUU", "TPU"])
def test_a_device_that_is_not_used_is_not_looked_for(pjrt_device, fresh, xla):
    fresh.setattr(detect, "_pjrt_device_before_torch_xla", [pjrt_device])
    assert select_backend("cpu").name == "cpu"
    fresh.setenv("USE_TORCH_XLA", "0")
    assert select_backend().name == "cpu"


@pytest.mark.parametrize("variable", ["CPU", "TPU"])
def test_a_runtime_that_is_started_for_another_device_is_an_error(variable, fresh, xla):
    """Whatever the variable says by now."""
    fresh.setenv("PJRT_DEVICE", variable)
    fresh.setattr(selection, "tpu_chips", lambda: 4)
    for choose in (select_backend, lambda: select_backend("xla")):
        with pytest.raises(ValueError) as error:
            choose()
        assert "already started with PJRT_DEVICE=CPU" in str(error.value)
        assert "Set PJRT_DEVICE=TPU before" in str(error.value) and "restart" in str(error.value)
    assert os.environ["PJRT_DEVICE"] == variable


@pytest.mark.parametrize("before", [None, "1", "0"])
def test_upstream_leaves_torch_xla_alone_and_child_processes_choose_anew(before, fresh, xla):
    import accelerate.utils
    import transformers.utils

    if before is not None:
        fresh.setenv("USE_TORCH_XLA", before)
    select_backend("xla")
    assert os.environ.get("USE_TORCH_XLA") == before
    assert not transformers.utils.is_torch_xla_available()
    assert not accelerate.utils.is_torch_xla_available()


# ---- What needs a process of its own ----


@pytest.mark.slow
def test_a_device_that_there_is_not_is_told_to_whoever_would_use_it(tmp_path):
    run_script(
        """
import sys
from hf_tpu_ext import TPUSFTConfig
assert TPUSFTConfig(sys.argv[1], use_cpu=True).device.type == "cpu"
assert TPUSFTConfig(sys.argv[1], backend="cpu").device.type == "cpu"
try:
    TPUSFTConfig(sys.argv[1])
except ValueError as error:
    assert "PJRT_DEVICE=TPU is set but this machine has no TPU" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
        PJRT_DEVICE="TPU",
    )


@pytest.mark.ci
def test_choosing_on_a_plain_machine_imports_and_starts_nothing(tmp_path):
    run_script(
        """
import os, sys
from hf_tpu_ext.backends import select_backend, selection

backend = select_backend()
assert backend.name == "cpu", backend.reason
assert "torch_xla" not in sys.modules
from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from trl import SFTConfig
config = SFTConfig(sys.argv[1])
assert config.bf16, "TRL's default"
assert config.device.type == "cpu"
assert TPUSFTConfig(sys.argv[1]).device.type == "cpu"
assert "torch_xla" not in sys.modules
assert not {"PJRT_DEVICE", "USE_TORCH_XLA"} & set(os.environ)

# A TPU of four chips, as far as its PCI entries go.
selection.tpu_chips = sys.modules["hf_tpu_ext.backends.detect"].tpu_chips = lambda: 4
tpu = selection._choose()
import torch_xla
assert (tpu.name, os.environ["PJRT_DEVICE"]) == ("xla", "TPU")
assert not torch_xla._XLAC._xla_runtime_is_initialized()
""",
        tmp_path,
    )


TRAIN = """
import os, sys, torch
{before}
import accelerate.utils, transformers.utils
from datasets import Dataset
from trl import SFTConfig
assert transformers.utils.is_torch_xla_available()
output_dir, model_dir = sys.argv[1:]
config = SFTConfig(output_dir, max_steps=1, max_length=16, report_to="none", save_strategy="no")
assert config.device.type == "xla" and config.bf16
assert "hf_tpu_ext.trainers" not in sys.modules
from hf_tpu_ext import TPUSFTTrainer
trainer = TPUSFTTrainer(model_dir, config, train_dataset=Dataset.from_list([{{"text": "abcd"}}] * 8))
trainer.train()
assert trainer.state.log_history[-1]["train_loss"] > 0
assert not transformers.utils.is_torch_xla_available() and not accelerate.utils.is_torch_xla_available()
devices = {{parameter.device.type for parameter in trainer.model.parameters()}}
moments = [value for state in trainer.optimizer.state.values() for name, value in state.items() if name != "step"]
{after}
"""


@pytest.mark.slow
def test_upstream_imported_before_and_a_config_made_before(tmp_path):
    """torch_xla's own import has set PJRT_DEVICE=CPU by then, and the config stands on the XLA device."""
    run_script(
        TRAIN.format(
            before="import torch_xla\nassert os.environ['PJRT_DEVICE'] == 'CPU'",
            after="assert trainer.backend.name == 'cpu', trainer.backend.reason\n"
            "assert devices == {'cpu'} == {trainer.accelerator.device.type}",
        ),
        tmp_path / "out",
        make_model(tmp_path / "model", hidden_size=32, num_hidden_layers=1),
    )


def test_bfloat16_on_a_pretended_tpu_keeps_weights_and_moments_in_float32(tmp_path):
    """accelerate would set XLA_USE_BF16=1 there, which turns every float32 tensor of the process into bfloat16."""
    run_script(
        TRAIN.format(
            before="import torch_xla.runtime\ntorch_xla.runtime.device_type = lambda: 'TPU'",
            after="""
assert trainer.backend.name == "xla" and trainer.backend.device_name != "CPU, compiled by XLA"
assert devices == {"xla"} == {trainer.accelerator.device.type}
assert "XLA_USE_BF16" not in os.environ and "XLA_DOWNCAST_BF16" not in os.environ
assert trainer.adapted.compute_dtype == torch.bfloat16
assert trainer.accelerator.mixed_precision == "no"
weights = list(trainer.model.parameters())
assert {value.dtype for value in weights + moments} == {torch.float32}
# What XLA holds, which with that variable is not what PyTorch says.
text = torch_xla._XLAC._get_xla_tensors_hlo([value + 2.5 for value in weights + moments])
assert "f32[" in text.replace("bf16[", "") and "bf16[" not in text
# The pretence works: this is what accelerate does by itself.
accelerate.utils.imports._torch_xla_available = True
accelerate.utils.is_torch_xla_available.cache_clear()
accelerate.state.AcceleratorState._reset_state(True)
accelerate.Accelerator(mixed_precision="bf16")
assert os.environ["XLA_USE_BF16"] == "1"
""",
        ),
        tmp_path / "out",
        make_model(tmp_path / "model", hidden_size=32, num_hidden_layers=1),
        run=forked.run,
        PJRT_DEVICE="CPU",
    )


@pytest.mark.slow
def test_several_local_devices_are_one_process_with_spmd(tmp_path):
    run_script(
        """
import torch
from hf_tpu_ext.backends import select_backend

backend = select_backend()
import torch_xla, torch_xla.runtime
assert backend.name == "xla"
assert not torch_xla._XLAC._xla_runtime_is_initialized() and not torch_xla.runtime.is_spmd()
assert backend.num_chips == 2
assert torch_xla.runtime.is_spmd()
before = backend.counters()
sent = backend.send(torch.ones(3))
assert backend.fetch(sent + sent).tolist() == [2, 2, 2]
backend.wait()
assert (backend.counters() - before).executions == 1
assert select_backend("xla").num_chips == 2
""",
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="2",
    )


@pytest.mark.slow
def test_fewer_devices_than_there_are(tmp_path):
    """By the variable, and by the setting, which counts more."""
    script = """
from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends import select_backend

config = TPUSFTConfig("{output_dir}", num_chips={num_chips})
backend = select_backend(num_chips=config.num_chips)
import torch_xla, torch_xla.runtime
assert not torch_xla._XLAC._xla_runtime_is_initialized()
assert backend.num_chips == {expected} == torch_xla.runtime.global_runtime_device_count()
assert torch_xla.runtime.is_spmd() == ({expected} > 1)
"""
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "TPU_NUM_DEVICES": "4"}
    for num_chips, expected in ((None, 4), (2, 2), (1, 1)):
        run_script(script.format(output_dir=tmp_path, num_chips=num_chips, expected=expected), **env)


@pytest.mark.slow
def test_several_chips_of_a_pretended_tpu_have_a_name(tmp_path):
    """Where one device stands for all chips, torch_xla refuses to say what it is and what it holds."""
    run_script(
        """
import torch_xla.runtime
torch_xla.runtime.device_type = lambda: "TPU"
from hf_tpu_ext.backends import select_backend

backend = select_backend()
assert backend.num_chips == 2 and torch_xla.runtime.is_spmd()
assert backend.device_name.startswith("TPU"), backend.device_name
assert backend.memory_per_chip is None
""",
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="2",
    )


@pytest.mark.slow
def test_a_launcher_on_a_slice_is_refused():
    run_script(
        """
import torch_xla.runtime
torch_xla.runtime.process_count = lambda: 4
from hf_tpu_ext.backends import select_backend

try:
    select_backend().num_chips
except ValueError as error:
    message = str(error)
assert "A launcher has started this process (WORLD_SIZE=16)" in message, message
assert "one process of a host drives all its chips (4 of this slice)" in message, message
assert "once on every host, without torchrun or accelerate launch" in message, message
""",
        PJRT_DEVICE="CPU",
        WORLD_SIZE="16",
    )


def test_hosts_of_a_slice_are_counted_before_the_runtime_starts(chip_variables, monkeypatch):
    """For `num_chips`, which would cut this host out of its slice."""
    from hf_tpu_ext.backends.xla.hosts import hosts_of_slice

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    for names, count in (("10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5", 4), ("localhost", 1)):
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", names)
        assert (hosts_of_slice("TPU"), hosts_of_slice("CPU")) == (count, 1)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.2,10.0.0.3")
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", "1,1,1")
    assert hosts_of_slice("TPU") == 1
