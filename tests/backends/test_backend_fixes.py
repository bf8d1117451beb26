"""Variables and settings of an accelerator that a message refuses are accepted once they are set as it says."""

import socket
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
import torch.distributed as dist
from fixes import assert_fixes, refusal
from transformers import GenerationConfig

from hf_tpu_ext.backends import compile_cache, detect, selection, slice_hosts
from hf_tpu_ext.backends.device_processes import DeviceProcesses
from hf_tpu_ext.backends.processes import HostsDisagree
from hf_tpu_ext.backends.torch_tpu.backend import TorchTPUBackend
from hf_tpu_ext.backends.xla.tracing import TracingBackend
from hf_tpu_ext.generation.sampling import check_generation_config


@pytest.fixture
def with_variables(monkeypatch):
    """Calls a function with environment variables."""

    def wrap(function, *names):
        def check(**settings):
            for name in names:
                # What the function itself sets is taken back, too.
                monkeypatch.setenv(name, "")
                monkeypatch.delenv(name)
            for name in names:
                if name in settings:
                    monkeypatch.setenv(name, str(settings[name]))
            return function(**{name: value for name, value in settings.items() if name not in names})

        return check

    return wrap


@pytest.mark.parametrize("value", ["eight", "0", "-1"])
def test_devices_of_the_host(with_variables, value):
    check = with_variables(lambda: detect.local_chips("CPU"), "CPU_NUM_DEVICES")
    assert_fixes(check, {"CPU_NUM_DEVICES": value}, "Set it to 1", "for example CPU_NUM_DEVICES=8")
    assert check() == 1


def test_a_part_of_a_host(with_variables):
    names = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
    check = with_variables(lambda num_chips: detect.show_chips("TPU", num_chips, 8), *names)
    assert_fixes(check, {"num_chips": 3}, "Set num_chips to one of 1, 2, 4, 8.")


def test_chips_that_are_wanted(with_variables):
    check = with_variables(lambda: selection._requested_chips(None), "TPU_NUM_DEVICES")
    message = refusal(check, {"TPU_NUM_DEVICES": "many"})
    for number in ("1", "4", "8"):
        assert number in message.partition("Set it to ")[2]
        check(TPU_NUM_DEVICES=number)
    check()


def test_seconds_of_silence(with_variables):
    check = with_variables(slice_hosts.read_seconds, slice_hosts.SILENCE_VARIABLE)
    assert_fixes(check, {slice_hosts.SILENCE_VARIABLE: "soon"}, "Set it to 60")
    assert check() == 60


@pytest.mark.parametrize("value", ["10.0.0.2", ":8000", "10.0.0.2:", "10.0.0.2:many", "10.0.0.2:99999"])
def test_address_of_the_first_host(with_variables, value):
    check = with_variables(slice_hosts.read_address, slice_hosts.VARIABLE)
    message = refusal(check, {slice_hosts.VARIABLE: value})
    example = message.partition(f"for example {slice_hosts.VARIABLE}=")[2].removesuffix(".")
    assert check(**{slice_hosts.VARIABLE: example}) == ("10.0.0.2", 12356)
    assert check() == ("", 12356)


def free_port():
    with socket.socket() as listening:
        listening.bind(("", 0))
        return listening.getsockname()[1]


@pytest.mark.ci
def test_a_host_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(slice_hosts, "_CONNECT", 1.0)
    start = lambda index, count, port: slice_hosts.SliceHosts(index, count, "localhost", port)  # noqa: E731
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        message = refusal(start, {"index": 0, "count": 2, "port": taken})
    assert message.startswith(f"Host 0 of 2 cannot reach the first at localhost:{taken} (")
    assert "a port that is free there" in message
    start(0, 1, free_port()).close()
    assert "Host 1 of 2 cannot reach the first" in refusal(start, {"index": 1, "count": 2, "port": free_port()})


def test_a_host_that_does_not_come(monkeypatch):
    hosts = slice_hosts.SliceHosts(0, 1, "localhost", free_port())
    monkeypatch.setattr(slice_hosts, "_EXCHANGE", 0.1)
    try:
        assert hosts.exchange("the start of training") == [None]
        hosts.count = 2
        with pytest.raises(
            HostsDisagree, match="Host 1 did not come to the end of a step within 0.1 seconds, where host 0"
        ):
            hosts.exchange("the end of a step")
    finally:
        hosts.count = 1
        hosts.close()


def test_a_launcher_with_torch_xla(xla, with_variables):
    from hf_tpu_ext.backends.xla.hosts import join_hosts

    check = with_variables(join_hosts, "WORLD_SIZE", "LOCAL_RANK")
    for variables in ({"WORLD_SIZE": 4}, {"WORLD_SIZE": 1, "LOCAL_RANK": 0}):
        message = refusal(check, variables)
        assert "start the command itself once on every host, without torchrun or accelerate launch" in message
    assert check().count == 1


def test_torch_tpu_without_a_device(monkeypatch):
    monkeypatch.setattr(selection, "has_torch_tpu", lambda: True)
    check = lambda backend: selection._explicit(backend, f"backend='{backend}'")  # noqa: E731
    message = refusal(check, {"backend": "tpu"})
    assert (
        "it found no TPU chip when torch was imported" in message and "Use 'auto' to auto-detect, or 'cpu'" in message
    )
    check("cpu")
    selection._choose()


def test_chips_of_a_host_among_several(xla, monkeypatch):
    from hf_tpu_ext.backends.xla.backend import xr

    monkeypatch.setattr(xr, "process_count", lambda: 2)
    check = lambda num_chips=None: xla.use_chips(num_chips, "num_chips")  # noqa: E731
    assert_fixes(check, {"num_chips": 1}, "Leave num_chips out")


def test_chips_that_programs_are_traced_for():
    traced = SimpleNamespace(_host_chips=8)
    check = lambda num_chips=None: TracingBackend.use_chips(traced, num_chips, "num_chips")  # noqa: E731
    assert_fixes(check, {"num_chips": 4}, "Leave it out")
    traced._host_chips = 4
    # With a topology of 4.
    check(4)


def test_a_backward_pass_before_xla():
    script = """
import torch
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.errors import UserError
torch.ones((), requires_grad=True).backward()
try:
    select_backend("xla").device
except UserError as error:
    print(error)
"""
    result = forked.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "Make the trainer that uses XLA before anything is trained on the CPU" in result.stdout, result.stderr
    assert "in a notebook, restart the kernel first" in result.stdout


# ---- torch_tpu: a process for each chip ----


@pytest.fixture
def four_chips(monkeypatch):
    """torch_tpu's backend on a machine of four TPU chips."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    backend = TorchTPUBackend("a test")
    monkeypatch.setattr(TorchTPUBackend, "chips_of_host", 4)
    monkeypatch.setattr(backend, "_on_chip", True)

    def connect(nproc_per_node):
        """Of torch_tpu: 3 chips of 4 are no rectangle."""
        if nproc_per_node == 3:
            raise RuntimeError("no topology of 3 chips")
        addresses = ",".join(["localhost:8476"] * (nproc_per_node * backend.hosts_of_slice))
        monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", addresses)

    backend.hosts_of_slice = 1
    launcher = SimpleNamespace(distributed=SimpleNamespace(set_tpu_launch_env=connect))
    monkeypatch.setattr(torch, "tpu", launcher, raising=False)
    return backend


def test_processes_without_what_connects_their_chips(four_chips, with_variables):
    names = ("WORLD_SIZE", "TORCH_TPU_SLICEBUILDER_ADDRESSES")
    check = with_variables(lambda: four_chips.processes, *names)
    message = refusal(check, {"WORLD_SIZE": 4})
    assert "Start the command once, by hf-tpu" in message
    assert "before torchrun: eval $(python -m torch.tpu.distributed | sed 's/^/export /')" in message
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(check(WORLD_SIZE=4, TORCH_TPU_SLICEBUILDER_ADDRESSES="localhost:8476"), DeviceProcesses)
    finally:
        dist.destroy_process_group()


def test_one_process_for_several_chips(four_chips, with_variables):
    check = with_variables(lambda num_chips=None: four_chips.use_chips(num_chips, "num_chips"), "WORLD_SIZE")
    message = refusal(check, {"num_chips": 4})
    assert "here is 1. Start the command by hf-tpu" in message and "torchrun --nproc_per_node=4" in message
    assert "here are 2" in refusal(check, {"num_chips": 4, "WORLD_SIZE": 2})
    check(num_chips=4, WORLD_SIZE=4)
    check()


@pytest.mark.parametrize("num_chips", [3, 8])
def test_chips_that_processes_cannot_have(four_chips, num_chips):
    fixes = ["Leave it out"] if num_chips == 8 else ["Leave it out", "set it to 1"]
    check = lambda num_chips=None: selection.prepare_processes(four_chips, num_chips)  # noqa: E731
    assert_fixes(check, {"num_chips": num_chips}, *fixes)
    assert check() == 4


def test_processes_on_several_hosts(four_chips):
    four_chips.hosts_of_slice = 2
    message = refusal(lambda: selection.prepare_processes(four_chips, None), {})
    assert "one of several hosts (8 chips together)" in message and "Start them by torchrun on each host" in message


def test_a_directory_for_compiled_programs():
    message = refusal(lambda setting: compile_cache.cache_root(setting), {"setting": ""})
    assert message == "compile_cache_dir is empty. Set it to 'auto', to 'off' or to a directory."
    message = refusal(lambda setting: compile_cache.cache_root(setting), {"setting": "gs://bucket/compile"})
    assert "compile_cache_dir=gs://bucket/compile is an address" in message and "/mnt/bucket/compile" in message
    for setting in ("auto", "off", "directory", "/mnt/bucket/compile"):
        compile_cache.cache_root(setting)


def test_tracing_without_torch_xla(monkeypatch):
    monkeypatch.setattr(selection, "has_torch_xla", lambda: False)
    message = refusal(lambda: selection.select_tracing(8), {})
    assert "Ahead-of-time tracing needs torch_xla, which is not installed: pip install " in message


@pytest.mark.parametrize(
    "setting",
    [{"min_length": 4}, {"num_beams": 2}, {"min_length": 9}, {"typical_p": 0.5}, {"bad_words_ids": [[3]]}],
    ids=str,
)
def test_settings_of_a_generation(setting):
    assert_fixes(lambda **settings: check_generation_config(GenerationConfig(**settings)), setting, "Leave it out")
