"""Processes that are the hosts of a pretended slice, with one SPMD runtime of torch_xla over the devices of all."""

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest


HERE = Path(__file__).parent
# Its metadata names no licence: it is fetched for these tests, and not part of anything that is shipped.
WHEEL = "xla-cpu-pjrt==0.0.1"
#: The host of each device: two hosts that take turns, and four as libtpu has them on a v5e of 4 x 4.
TWO, FOUR = "0,1,0,1", "0,0,1,1,0,0,1,1,2,2,3,3,2,2,3,3"


def find_plugins() -> tuple[Path, Path]:
    """The real plugin and the one that is put before it, made once for all runs of the tests."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    source = HERE / "pjrt_slice.cpp"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_tpu_ext_tests"
    cache.mkdir(parents=True, exist_ok=True)
    real, shim = (
        cache / "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
        cache / f"pjrt_slice_{source.stat().st_mtime_ns}.so",
    )
    if not real.is_file():
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--retries",
            "1",
            "--dest",
            str(cache),
            WHEEL,
        ]
        result = subprocess.run(download, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"{WHEEL} cannot be downloaded")
        with zipfile.ZipFile(next(cache.glob("xla_cpu_pjrt-*.whl"))) as wheel:
            # Another process of the tests may do the same.
            part = cache / f"part-{os.getpid()}"
            wheel.extractall(part)
        # What a run that was killed has left has no such file.
        if not real.is_file():
            shutil.rmtree(cache / "xla_plugins", ignore_errors=True)
            (part / "xla_plugins").rename(cache / "xla_plugins")
        shutil.rmtree(part)
    if not shim.is_file():
        part = shim.with_suffix(f".{os.getpid()}")
        include = str(real.parent / "include")
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-I", include, str(source), "-o", str(part), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(shim)
    return real, shim


@dataclass
class Slice:
    """Processes that are the hosts of a slice, and the files that they write to."""

    processes: list[subprocess.Popen]
    directory: Path
    name: str

    def output(self, host):
        return (self.directory / f"{self.name}.log.{host}").read_text(errors="replace")

    def wait(self, timeout=600):
        """Exit statuses."""
        try:
            return [process.wait(timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def results(self):
        return [
            json.loads((self.directory / f"{self.name}.{host}").read_text()) for host in range(len(self.processes))
        ]

    def run(self):
        """What each host tells of each run, all of which end well."""
        statuses = self.wait()
        assert statuses == [0] * len(statuses), "\n".join(self.output(host)[-2000:] for host in range(len(statuses)))
        return self.results()


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def without_times(log):
    return [entry for entry in log if "train_loss" not in entry]


def assert_same_log(log, other, rel=1e-5):
    """Every logged number is that of the other run, to `rel` of it."""
    log, other = without_times(log), without_times(other)
    assert [sorted(entry) for entry in log] == [sorted(entry) for entry in other]
    for mine, theirs in zip(log, other, strict=True):
        for key, value in theirs.items():
            # Rewards are differences of sums over tokens.
            least = 1e-5 if "rewards" in key else 1e-7
            assert mine[key] == pytest.approx(value, rel=rel, abs=least if rel else 0), (
                f"{key} at step {theirs['step']}: {mine[key]!r} and {value!r}"
            )
