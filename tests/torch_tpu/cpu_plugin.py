"""
torch_tpu on the host: its dispatcher, and XLA of the PJRT plug-in for CPU (`xla-cpu-pjrt` of PyPI) in place of libtpu.

torch_tpu has no CPU mode. It loads the plug-in that `TPU_LIBRARY_PATH` names, and looks for TPU chips on the PCI bus. What is
missing in the plug-in is added to its table of functions. The names used are those of torch_tpu 0.2.0 and xla-cpu-pjrt 0.0.1.

    python tests/torch_tpu/cpu_plugin.py SCRIPT ...     runs a script with it, where it is installed
"""

import ctypes
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path


PACKAGES = ("torch_tpu", "xla_plugins.xla_cpu_pjrt")
# The head of `PJRT_Api`: its size, extensions, and the version with its own size, extensions and two numbers.
_HEAD, _SLOT = 40, 8
_KIND, _MOST_OUTPUTS = b"device", 65536


class _NumOutputs(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("executable", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    ]


class _OutputKinds(ctypes.Structure):
    _fields_ = [*_NumOutputs._fields_, ("kinds", ctypes.c_void_p), ("sizes", ctypes.c_void_p)]


_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
# What the plug-in points to lives as long as the process.
_kept: list = []


def why_absent() -> str | None:
    """Why torch_tpu cannot run here on the host, or `None` where it can."""
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"{name} is not installed; `make test-torch-tpu` makes an environment with it"
    return None


def start() -> None:
    """Make `tpu` a device of this process. Before PyTorch's first operator."""
    (directory,) = importlib.util.find_spec(PACKAGES[1]).submodule_search_locations
    plugin = Path(directory) / "xla_cpu_pjrt.so"
    os.environ["TPU_LIBRARY_PATH"] = str(plugin)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Threads of the plug-in, which has as many as there are cores. When each of them frees a buffer that is still to be written, none is
    # left to write it.
    os.environ.setdefault("PJRT_NPROC", "64")
    _add_output_kinds(plugin)
    import torch
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: 1
    _loader.load()
    # Flash attention is a kernel for TPU.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    # The plug-in cannot read its program: the plug-in's StableHLO is older than torch_tpu's.
    cumsum = torch.Tensor.cumsum
    torch.Tensor.cumsum = lambda tensor, dim, **more: (
        _cumsum(tensor, dim, **more) if tensor.device.type == "tpu" else cumsum(tensor, dim, **more)
    )
    torch.cumsum = torch.Tensor.cumsum
    if "WORLD_SIZE" in os.environ:
        # The plug-in connects no chips. Each process learns that it is on its own when its runtime is started, and speaks to the
        # others by the host. Upstream's arguments would have them meet by tpu_dist.
        hidden = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        # By a transfer: a program would be compiled before it is known where programs are kept.
        torch.zeros(()).to("tpu:0")
        os.environ.update(hidden)
        import collectives_by_host

        torch.distributed.init_process_group(collectives_by_host.NAME)


def _cumsum(tensor, dim, dtype=None):
    import torch

    places = torch.arange(tensor.shape[dim], device=tensor.device)
    terms = tensor.transpose(dim, -1).unsqueeze(-2) * (places[:, None] >= places)
    return terms.sum(-1, dtype=dtype).transpose(dim, -1)


def _add_output_kinds(plugin: Path) -> None:
    """Say that every result of a program is in the memory of the device. `torch.compile` asks."""
    header = (plugin.parent / "include" / "pjrt_c_api.h").read_text()
    slots = re.findall(r"^\s*_PJRT_API_STRUCT_FIELD\((PJRT_\w+)\);", header, re.MULTILINE)
    library = ctypes.CDLL(str(plugin))
    library.GetPjrtApi.restype = ctypes.c_void_p

    def slot(name: str) -> int:
        return library.GetPjrtApi() + _HEAD + _SLOT * slots.index(name)

    count_outputs = _Function(ctypes.c_uint64.from_address(slot("PJRT_Executable_NumOutputs")).value)
    kinds = (ctypes.c_char_p * _MOST_OUTPUTS)(*[_KIND] * _MOST_OUTPUTS)
    sizes = (ctypes.c_size_t * _MOST_OUTPUTS)(*[len(_KIND)] * _MOST_OUTPUTS)

    @_Function
    def output_kinds(address):
        answer = _OutputKinds.from_address(address)
        question = _NumOutputs(ctypes.sizeof(_NumOutputs), None, answer.executable, 0)
        if error := count_outputs(ctypes.addressof(question)):
            return error
        answer.count, answer.kinds, answer.sizes = question.count, ctypes.addressof(kinds), ctypes.addressof(sizes)
        return None

    place = ctypes.c_void_p.from_address(slot("PJRT_Executable_OutputMemoryKinds"))
    place.value = ctypes.cast(output_kinds, ctypes.c_void_p).value
    _kept.extend([library, kinds, sizes, count_outputs, output_kinds])


if __name__ == "__main__":
    if why_absent() is None:
        start()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
