"""The machine, made in directories: the compile cache, chips and who holds them."""

import os
import sys

import pytest

from hf_tpu_ext.backends.compile_cache import CompileCache
from hf_tpu_ext.doctor.machine import (
    check_backend,
    check_compile_cache,
    check_tpu,
)
from hf_tpu_ext.installing import install_command


@pytest.fixture
def tpu(tmp_path):
    """PCI devices of a machine with four chips of v5e."""
    for number in range(4):
        device = tmp_path / "pci" / f"0000:00:0{number}.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text("0x0063\n")
    (tmp_path / "proc").mkdir()
    return {"pci_root": str(tmp_path / "pci"), "proc": tmp_path / "proc", "lock_file": tmp_path / "libtpu_lockfile"}


def hold_chip(proc, pid=4321):
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fd" / "7").symlink_to("/dev/accel2")
    (proc / str(pid) / "cmdline").write_bytes(b"python\0old_run.py\0")


def test_no_tpu(tmp_path):
    (check,) = check_tpu(str(tmp_path))
    assert (check.name, check.status) == ("TPU", "none")


def test_a_free_tpu(tpu):
    found, use = check_tpu(**tpu)
    assert found.text == "4 chips, TPU v5e"
    assert (use.status, use.text) == ("ok", "by no process")


def test_a_tpu_that_is_held(tpu):
    hold_chip(tpu["proc"])
    tpu["lock_file"].touch()
    _, use = check_tpu(**tpu)
    assert use.status == "failed"
    assert use.text == "/dev/accel2 by process 4321: python old_run.py"
    assert "kill 4321" in use.fix


def test_a_lock_that_a_killed_process_has_left(tpu):
    tpu["lock_file"].touch()
    _, use = check_tpu(**tpu)
    assert use.status == "failed"
    assert use.fix == f"sudo rm {tpu['lock_file']}"


def test_compile_cache(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("HF_TPU_EXT_COMPILE_CACHE", str(root))
    assert "0 executables" in check_compile_cache(True).text
    assert not root.exists()
    cache = CompileCache(root, "toolchain", {})
    (cache.directory / "123").write_bytes(b"x" * 1000)
    (cache.directory / "456").write_bytes(b"x" * 10)
    check = check_compile_cache(True)
    assert check.status == "ok"
    assert check.text.startswith("2 executables, 1.01 kB of at most 21.47 GB, in ")


def test_compile_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_TPU_EXT_COMPILE_CACHE", str(tmp_path / "file" / "cache"))
    check = check_compile_cache(True)
    assert check.status == "failed"
    assert "HF_TPU_EXT_COMPILE_CACHE" in check.fix


def test_compile_cache_without_a_tpu(monkeypatch):
    monkeypatch.delenv("HF_TPU_EXT_COMPILE_CACHE", raising=False)
    assert check_compile_cache(False).status == "none"
    monkeypatch.setenv("HF_TPU_EXT_COMPILE_CACHE", "off")
    assert check_compile_cache(False).text == "off"


def python(script):
    return (sys.executable, "-c", script)


@pytest.mark.ci
def test_the_backend_of_a_run():
    assert check_backend(has_tpu=False).text == "xla: PJRT_DEVICE=CPU is set"


@pytest.mark.parametrize(
    ("pjrt_device", "text"),
    [
        pytest.param("TPUU", "PJRT_DEVICE='TPUU' is not a supported device", marks=pytest.mark.slow),
        ("TPU", "PJRT_DEVICE=TPU is set but this machine has no TPU"),
    ],
)
def test_a_device_that_there_is_not(pjrt_device, text, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", pjrt_device)
    # As in the command's own process, which imports neither.
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    check = check_backend(has_tpu=False)
    assert (check.status, check.text[: len(text)]) == ("failed", text)
    assert check.fix.startswith("Set PJRT_DEVICE=CPU")


def test_a_tpu_that_would_not_be_used():
    check = check_backend(True, python("""print('["cpu", "a TPU is attached but torch_xla is not used"]')"""))
    assert check.status == "failed"
    assert install_command("tpu") in check.fix


@pytest.mark.parametrize(
    ("script", "text", "fix"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed (SIGSEGV)", "versions that do not match"),
        ("import os; os.kill(os.getpid(), 9)", "killed by the system", "Close other programs"),
        ("import absent_module", "No module named 'absent_module'", "--force-reinstall"),
        ("raise ValueError('Unknown backend')", "ValueError: Unknown backend", "--json FILE"),
    ],
)
def test_an_import_that_does_not_come_back(script, text, fix):
    check = check_backend(False, python(script))
    assert check.status == "failed"
    assert text in check.text
    assert fix in check.fix


def test_nothing_of_the_examination_imports_torch():
    script = "import sys, hf_tpu_ext.doctor.machine, hf_tpu_ext.doctor.trials; sys.exit('torch' in sys.modules)"
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", script) == 0
