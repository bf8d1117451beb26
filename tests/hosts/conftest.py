"""Hosts of a slice that is pretended: see `pretended_slice.py`."""

import json
import os
import subprocess
import sys

import forked
import pytest
from pretended_slice import HERE, Slice, find_plugins, free_port

from hf_tpu_ext.examples.tiny import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny Qwen3 with its tokenizer."""
    return make_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture(scope="session")
def start_slice(tiny_model, tmp_path_factory):
    """Starts the hosts of a slice, by the host of each device, with the runs of `hosts_driver.py`; or one process."""
    started = []

    def start(host_of_device, spec, name="run", driver=HERE / "hosts_driver.py", arguments=None, **environment):
        directory = tmp_path_factory.mktemp(name)
        devices = host_of_device.split(",")
        for settings in spec.values():
            settings.setdefault("output_dir", str(directory / "out"))
        (directory / "spec.json").write_text(json.dumps(spec))
        given = [str(tiny_model), str(directory / "spec.json"), str(directory / name)]
        common = {**os.environ, "HF_TPU_EXT_BACKEND": "xla", **environment}
        # Pytest's own.
        common["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [common.get("PYTHONPATH")])])
        if len(set(devices)) == 1:
            hosts = [{"CPU_NUM_DEVICES": str(len(devices))}]
        else:
            real, shim = find_plugins()
            common |= {"SLICE_PLUGIN": str(real), "SLICE_SHIM": str(shim), "SLICE_HOSTS": host_of_device}
            common |= {"SLICE_SOCKET": str(directory / "socket"), "HF_TPU_EXT_HOSTS": f"localhost:{free_port()}"}
            hosts = [{"SLICE_HOST": host} for host in sorted(set(devices))]
        # The switch is read while an interpreter starts.
        popen = subprocess.Popen if "HF_TPU_EXT" in environment else forked.Popen
        processes = []
        for index, own in enumerate(hosts):
            log = open(directory / f"{name}.log.{index}", "w")
            command = [sys.executable, str(driver), *(given if arguments is None else arguments)]
            processes.append(popen(command, env={**common, **own}, stdout=log, stderr=log))
        slice_ = Slice(processes, directory, name)
        started.append(slice_)
        return slice_

    yield start
    for slice_ in started:
        for process in slice_.processes:
            process.kill()
            process.wait()
