"""The machine around an accelerator, made in a directory."""

import os
import resource
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from hf_tpu_ext.backends.host import (
    HUGEPAGES_COMMAND,
    ChipHolder,
    enable_hugepages,
    find_chip_holders,
    hugepages_setting,
    let_forks_tokenize,
)


@contextmanager
def nothing_can_be_written():
    """The kernel refuses it to root, too, which no file mode does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_somebody_else():
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("setting", ["always", "madvise", "never"])
def test_hugepages_setting(setting, tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always madvise never\n".replace(setting, f"[{setting}]"))
    assert hugepages_setting(path) == setting


def test_a_kernel_without_hugepages(tmp_path):
    assert hugepages_setting(tmp_path / "absent") is None
    assert enable_hugepages(tmp_path / "absent") == []


def test_hugepages_are_enabled_where_permitted(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    (line,) = enable_hugepages(path)
    assert path.read_text() == "always"
    assert "were madvise and are always from now on" in line


def test_the_command_where_it_is_not_permitted(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always madvise [never]\n")
    with nothing_can_be_written():
        (line,) = enable_hugepages(path)
    assert line.startswith("Transparent hugepages are never")
    assert line.endswith(HUGEPAGES_COMMAND)


def test_nothing_is_said_where_they_are_on(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("[always] madvise never\n")
    assert enable_hugepages(path) == []
    assert path.read_text() == "[always] madvise never\n"


def test_the_host_is_left_alone_without_a_tpu(xla):
    assert xla.prepare_host() == []


@pytest.mark.slow
def test_hugepages_are_enabled_for_a_tpu_before_its_runtime_starts(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    script = """
import sys
from pathlib import Path
from hf_tpu_ext.backends import host
from hf_tpu_ext.backends.xla import backend as xla
host.enable_hugepages.__defaults__ = (Path(sys.argv[1]),)  # instead of this machine's setting
(line,) = xla.XLABackend("a TPU", "TPU").prepare_host()
assert "were madvise and are always from now on" in line
assert not xla.runtime_started()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    subprocess.run([sys.executable, "-c", script, path], env=environment, check=True, timeout=120)
    assert path.read_text() == "always"


def make_process(proc, pid, command, files):
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes("\0".join(command).encode() + b"\0")
    for number, file in enumerate(files):
        (proc / str(pid) / "fd" / str(number)).symlink_to(file)


def test_processes_that_hold_chips():
    with tempfile.TemporaryDirectory() as directory:
        proc = Path(directory)
        proc.chmod(0o755)
        make_process(
            proc, 12, ["python", "train.py", "--x"], ["/dev/null", "/dev/accel1", "/dev/accel0", "/dev/accel1"]
        )
        make_process(proc, 7, ["jupyter"], ["/dev/vfio/vfio", "/dev/vfio/3"])
        make_process(proc, 8, ["vm"], ["/dev/vfio/vfio", "/dev/accelerator", "socket:[1]"])
        make_process(proc, os.getpid(), ["itself"], ["/dev/accel0"])
        make_process(proc, 9, ["somebody's"], ["/dev/accel0"])
        (proc / "9" / "fd").chmod(0)
        (proc / "11").mkdir()  # has ended
        (proc / "meminfo").touch()
        with as_somebody_else():
            holders, hidden = find_chip_holders(proc)
        (proc / "9" / "fd").chmod(0o755)
    assert holders == [
        ChipHolder(7, "jupyter", ["/dev/vfio/3"]),
        ChipHolder(12, "python train.py --x", ["/dev/accel0", "/dev/accel1"]),
    ]
    assert hidden == 1


def test_processes_of_this_machine_are_read():
    holders, _ = find_chip_holders()
    assert os.getpid() not in [holder.pid for holder in holders]


@pytest.mark.parametrize(
    ("workers", "method", "value", "changed"),
    [
        (2, None, "true", True),
        (2, "fork", "1", True),
        (0, None, "true", False),
        (2, "spawn", "true", False),
        (2, None, "false", False),
        (2, None, None, False),
    ],
)
def test_tokenizers_in_forks(workers, method, value, changed, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_start_method", lambda allow_none: "fork")
    if value is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    lines = let_forks_tokenize(workers, method)
    assert len(lines) == changed
    assert os.environ.get("TOKENIZERS_PARALLELISM") == ("false" if changed else value)


def test_a_fork_that_tokenizes_comes_back():
    """Without `let_forks_tokenize` this waits forever."""
    script = """
import multiprocessing
from tokenizers import Tokenizer, models
from hf_tpu_ext.backends.host import let_forks_tokenize
tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
texts = ["a" * 50] * 64
tokenizer.encode_batch(texts)
assert let_forks_tokenize(1, "fork")
fork = multiprocessing.get_context("fork").Process(target=tokenizer.encode_batch, args=(texts,), daemon=True)
fork.start()
fork.join(60)
assert fork.exitcode == 0, fork.exitcode
"""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
