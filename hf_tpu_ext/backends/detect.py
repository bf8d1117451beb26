"""What accelerator this machine has, answered without importing torch or torch_xla and without touching a device."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ..errors import UserError
from ..yes_no import NO, YES


#: Where Linux lists the devices of a machine.
PCI_ROOT = "/sys/bus/pci/devices"
# Google's PCI vendor id and the device ids of torch_xla/_internal/tpu.py.
_GOOGLE_PCI_VENDOR = "0x1ae0"
_TPU_PCI_DEVICES = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0062": "TPU v5p",
    "0x0076": "TPU 7x",
}
# Shape of that many neighbouring chips of one host.
_TPU_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}

#: Names of the accelerators, as settings give them.
BACKENDS = ("auto", "tpu", "xla", "cuda", "cpu")
#: Those that drive TPU chips.
TPU_BACKENDS = ("tpu", "xla")

_pjrt_device_before_torch_xla: list[str | None] = []


def tpu_chips(pci_root: str = PCI_ROOT) -> int:
    """Count the TPU chips attached to this machine, `0` where there is none."""
    return len(_tpu_kinds(pci_root))


def tpu_kind(pci_root: str = PCI_ROOT) -> str:
    """
    Kind of TPU chip attached to this machine, e.g. `"TPU v5e"`; `"TPU"` where it is not known. torch_xla does not say
    where one device stands for all chips (SPMD): `xla_device_kind` and `get_memory_info` fail.
    """
    return next(iter(_tpu_kinds(pci_root)), "TPU")


def _tpu_kinds(pci_root: str) -> list[str]:
    devices = [
        (vendor.parent / "device").read_text().strip()
        for vendor in Path(pci_root).glob("*/vendor")
        if vendor.read_text().strip() == _GOOGLE_PCI_VENDOR
    ]
    return [_TPU_PCI_DEVICES[device] for device in devices if device in _TPU_PCI_DEVICES]


def local_chips(pjrt_device: str) -> int:
    """Count the devices, at least 1, that the XLA runtime of this process will see, before it is started."""
    if pjrt_device == "TPU":
        visible = os.environ.get("TPU_VISIBLE_CHIPS")
        return max(1, tpu_chips() if visible is None else len(visible.split(",")))
    value = os.environ.get("CPU_NUM_DEVICES", "1")
    if not value.isdecimal() or not int(value):
        raise UserError(
            f"CPU_NUM_DEVICES={value!r} is not a number of devices. Set it to 1 or more, for example CPU_NUM_DEVICES=8, or "
            "unset it."
        )
    return int(value)


def show_chips(pjrt_device: str, num_chips: int, all_chips: int) -> None:
    """
    Let the XLA runtime of this process see only the first `num_chips` of `all_chips`. It reads this when it starts.

    On a TPU these are the variables of libtpu for a process with a part of the host's chips, as in
    `torch_xla/_internal/tpu.py` and https://cloud.google.com/tpu/docs/run-calculation-jax.

    Raises:
        `ValueError`: The chips cannot be cut this way.
    """
    if pjrt_device != "TPU":
        os.environ["CPU_NUM_DEVICES"] = str(num_chips)
        return
    if num_chips == all_chips:
        return
    if num_chips not in _TPU_CHIP_BOUNDS:
        sizes = sorted({size for size in _TPU_CHIP_BOUNDS if size < all_chips} | {all_chips})
        raise UserError(
            f"num_chips={num_chips}: a TPU host cannot be cut to that. Set num_chips to one of "
            f"{', '.join(map(str, sizes))}."
        )
    visible = os.environ.get("TPU_VISIBLE_CHIPS", ",".join(map(str, range(all_chips)))).split(",")
    os.environ["TPU_VISIBLE_CHIPS"] = ",".join(visible[:num_chips])
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = _TPU_CHIP_BOUNDS[num_chips]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"


def has_torch_xla() -> bool:
    """Whether torch_xla is installed. It is looked up, not imported."""
    return importlib.util.find_spec("torch_xla") is not None


def has_torch_tpu() -> bool:
    """Whether torch_tpu is installed. It is looked up, not imported."""
    spec = importlib.util.find_spec("torch_tpu")
    # Any directory of that name is a namespace package, which has no file.
    return spec is not None and spec.origin is not None


def would_use_tpu(backend: str | None, environment: Mapping[str, str]) -> bool:
    """
    Whether a run with a setting `backend` and these environment variables would be on this machine's TPU, as
    [`~hf_tpu_ext.backends.selection.select_backend`] chooses.
    """
    setting = backend if backend not in (None, "auto") else environment.get("HF_TPU_EXT_BACKEND", "auto")
    if not tpu_chips() or setting not in ("auto", *TPU_BACKENDS):
        return False
    # These two keep "auto" away, and no backend that is asked for by its name.
    is_auto = setting == "auto"
    if is_auto and environment.get("ACCELERATE_USE_CPU", "").lower() in YES:
        return False
    if setting != "xla" and has_torch_tpu():
        return True
    is_allowed = not is_auto or environment.get("USE_TORCH_XLA", "1").lower() not in NO
    return is_allowed and has_torch_xla() and environment.get("PJRT_DEVICE", "TPU") == "TPU"


def skip_metadata_query() -> None:
    """
    Keep libtpu from asking Google Cloud which TPU this machine is a part of, where torch_tpu is installed and there is none.

    PyTorch asks torch_tpu for its devices at the first backward pass, on the CPU too, and libtpu would wait for answers for
    minutes. Before that.
    """
    if has_torch_tpu() and not tpu_chips():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def remember_pjrt_device() -> None:
    """
    Note what `PJRT_DEVICE` says before torch_xla is imported.

    `import torch_xla` sets `PJRT_DEVICE=CPU` by itself where it finds no TPU, so afterwards the variable no longer tells
    whether a person asked for XLA on CPU. PyTorch's autoload calls this at the end of `import torch`, which always comes
    first.
    """
    if not _pjrt_device_before_torch_xla and "torch_xla" not in sys.modules:
        _pjrt_device_before_torch_xla.append(os.environ.get("PJRT_DEVICE"))


def pjrt_device_asked_for() -> str | None:
    """The value of `PJRT_DEVICE` that a person set; `None` where it is unset or was set by torch_xla's own import."""
    if "torch_xla" in sys.modules and _pjrt_device_before_torch_xla:
        return _pjrt_device_before_torch_xla[0]
    return os.environ.get("PJRT_DEVICE")


def find_pjrt_mistake(pjrt_device: str | None, chips: int) -> tuple[str, str] | None:
    """What is wrong with a `PJRT_DEVICE`, and the fix. The runtime itself would wait for a TPU for minutes."""
    fix = "Set PJRT_DEVICE=CPU to compile with XLA for the host, or unset PJRT_DEVICE to auto-detect"
    if pjrt_device and pjrt_device not in ("TPU", "CPU"):
        return f"PJRT_DEVICE={pjrt_device!r} is not a supported device. Allowed, in capitals: TPU, CPU", fix
    if pjrt_device == "TPU" and not chips:
        return "PJRT_DEVICE=TPU is set but this machine has no TPU (none among its PCI devices)", fix
    return None
