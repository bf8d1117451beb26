"""The state of an optimizer, and averages of weights, go to a file and come from one by one tensor at a time, as if they had been on the host."""

import os
import subprocess
import sys

import pytest


SCRIPT = """
import gc
import pathlib
import sys
import zipfile

import torch
import torch_xla
import torch_xla.debug.metrics as met

from safetensors import safe_open
from safetensors.torch import save_file

from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.backends.streamed import save_safetensors
from hf_tpu_ext.backends.xla import backend as xla_backend
from hf_tpu_ext.step.optimizer import LazyAdamW

xla_backend.FETCHED_AT_ONCE = 0
directory = pathlib.Path(sys.argv[1])
backend = select_backend("xla")
assert backend.num_chips == 4
backend.use_mesh({"data": 1, "fsdp": 4})


def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def make():
    parameters = [torch.nn.Parameter(torch.randn(1024, 512).to(backend.device)) for _ in range(32)]
    for parameter in parameters:
        backend.shard(parameter, ("fsdp", None))
    return LazyAdamW(parameters, backend=backend)


optimizer = make()
for group in optimizer.param_groups:
    for parameter in group["params"]:
        moments = {name: backend.place_as(torch.randn(1024, 512), parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
torch.save(backend.fetch(optimizer.state_dict()), directory / "fetched.pt")
size = (directory / "fetched.pt").stat().st_size
assert size > 2**27

# As much memory as one tensor needs, within what others of the process do.
torch.save({"small": torch.zeros(3)}, directory / "warm.pt")
gc.collect()
pathlib.Path("/proc/self/clear_refs").write_text("5")
uses = torch._C._storage_Use_Count(moments["exp_avg"].untyped_storage()._cdata)
gc.disable()
before = memory("VmRSS")
torch.save(backend.stream(optimizer.state_dict()), directory / "streamed.pt")
risen = memory("VmHWM") - before
assert risen < size / 4, (risen, size)
# Nothing holds on to the state, which the next step changes.
assert torch._C._storage_Use_Count(moments["exp_avg"].untyped_storage()._cdata) == uses
for name in ("fetched", "streamed"):
    with zipfile.ZipFile(directory / f"{name}.pt") as file:
        assert file.testzip() is None
        files = {info.filename.partition("/")[2]: (info.file_size, info.CRC) for info in file.infolist()}
        print({name: of for name, of in files.items() if name.startswith("data/")})

# The same as a file of safetensors.
averages = {f"weight.{index}": state["exp_avg"] for index, state in enumerate(optimizer.state.values())}
number, metadata = torch.tensor(2.0, dtype=torch.float64), {"updates": "3"}
save_file({**backend.fetch(averages), "ä": number}, directory / "fetched.safetensors", metadata)
gc.collect()
pathlib.Path("/proc/self/clear_refs").write_text("5")
gc.disable()
before = memory("VmRSS")
save_safetensors({**backend.stream(averages), "ä": number}, directory / "streamed.safetensors", metadata)
risen = memory("VmHWM") - before
files = [directory / f"{name}.safetensors" for name in ("fetched", "streamed")]
assert risen < files[0].stat().st_size / 4, risen
assert files[0].read_bytes() == files[1].read_bytes()
with safe_open(files[1], "pt") as file:
    assert file.metadata() == metadata and file.get_tensor("ä") == 2

# And back: each chip gets its part at once.
resumed = make()
sent = met.metric_data("OutboundData")[1]
resumed.load_state_dict(torch.load(directory / "streamed.pt", map_location="cpu", weights_only=True, mmap=True))
assert met.metric_data("OutboundData")[1] - sent < 1.1 * size
for parameter, state in resumed.state.items():
    for moment in (state["exp_avg"], state["exp_avg_sq"]):
        assert [tuple(part.shape) for part, _ in torch_xla._XLAC._get_local_shards([moment])[0]] == [(256, 512)] * 4
    assert state["step"].device.type == "cpu"
torch.testing.assert_close(backend.fetch(resumed.state_dict()), torch.load(directory / "fetched.pt"), rtol=0, atol=0)

# A row of what is split, and what stands twice.
moment = next(iter(optimizer.state.values()))["exp_avg"]
short = moment.to(torch.float8_e5m2)
saved = backend.stream({"whole": moment, "again": moment, "short": short})
save_safetensors({"row": saved["whole"][3], "again": saved["again"]}, directory / "parts.safetensors", {})
with safe_open(directory / "parts.safetensors", "pt") as file:
    assert torch.equal(file.get_tensor("row"), file.get_tensor("again")[3])
saved["row"] = saved["whole"][3].clone()
assert (saved["whole"].ndim, saved["row"].shape) == (2, (512,))
torch.save(saved, directory / "parts.pt")
found = torch.load(directory / "parts.pt", weights_only=True)
assert torch.equal(found["row"], found["whole"][3]) and torch.equal(found["whole"], backend.fetch(moment))
assert found["again"].data_ptr() == found["whole"].data_ptr()
assert torch.equal(found["short"].view(torch.uint8), backend.fetch(short).view(torch.uint8))
"""


@pytest.mark.slow
def test_state_of_an_optimizer_on_four_chips(tmp_path):
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    fetched, streamed = result.stdout.splitlines()
    assert "data/95" in fetched and fetched == streamed
