"""Choosing the backend, and keeping transformers and accelerate from choosing another."""

import os
from collections.abc import Sequence
from functools import cache

import torch

from ..errors import UserError
from ..hardware.topologies import Chip
from ..importing import without_garbage_collection
from ..installing import install_command, requirement
from ..yes_no import NO, YES
from .base import Backend
from .cpu import CPUBackend
from .cuda import CUDABackend
from .detect import (
    BACKENDS,
    find_pjrt_mistake,
    has_torch_tpu,
    has_torch_xla,
    pjrt_device_asked_for,
    skip_metadata_query,
    tpu_chips,
)


_backends: dict[str, Backend] = {}


@without_garbage_collection()
def select_backend(name: str | None = None, num_chips: int | None = None, use_cpu: bool = False) -> Backend:
    """
    Choose the accelerator for this process. Neither a device nor the XLA runtime is started.

    `"auto"` takes a TPU, by torch_tpu or by torch_xla, whichever is installed, then XLA on the host if `PJRT_DEVICE=CPU` asks for
    it, then CUDA, then the CPU. That torch_xla can be imported does not count: on a CUDA machine with torch_xla installed, CUDA is
    used. `USE_TORCH_XLA=0` keeps `"auto"` away from XLA.

    Args:
        name (`str`, *optional*):
            `"auto"`, `"tpu"` (torch_tpu), `"xla"` (torch_xla), `"cuda"` or `"cpu"`. By default what the environment variable
            `HF_TPU_EXT_BACKEND` says, or `"auto"`.
        num_chips (`int`, *optional*):
            How many of the accelerator's chips to drive. By default what the environment variable `TPU_NUM_DEVICES` says,
            or all.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Upstream's field: `"cpu"`, whatever the environment says.

    Returns:
        [`Backend`]: The backend; the same object for the same choice.

    Raises:
        `ValueError`: The name is unknown or not that of `use_cpu`, the accelerator that was asked for is absent, it has fewer
            chips, or the environment asks for a device that there is not.
    """
    if use_cpu and name not in (None, "auto", "cpu"):
        raise UserError(
            f"backend={name!r} and use_cpu=True ask for two devices. Set backend='cpu' to train on the CPU, or use_cpu=False."
        )
    backend = find_backend("cpu" if use_cpu else name)
    backend.use_chips(*_requested_chips(num_chips))
    _switch_off_upstream_xla()
    if backend.name != "cuda":
        _accept_bf16()
    if backend.traces_steps:
        import accelerate.optimizer

        # It searches `sys.path` for this optimizer twice a step.
        accelerate.optimizer.is_lomo_available = cache(accelerate.utils.is_lomo_available)
    return backend


def find_backend(name: str | None) -> Backend:
    """The backend that [`select_backend`] would choose, with as many chips as it has, and upstream left as it is."""
    setting, source = name or "auto", "backend"
    if setting == "auto":
        setting, source = os.environ.get("HF_TPU_EXT_BACKEND", "auto"), "HF_TPU_EXT_BACKEND"
    if setting not in BACKENDS:
        raise UserError(f"Unknown {source}={setting!r}. Allowed: {', '.join(BACKENDS)}.")
    if setting not in _backends:
        skip_metadata_query()
        # A choice stands once it is made, "auto" too: torch_xla's import changes the environment that it is made from.
        _backends[setting] = _choose() if setting == "auto" else _explicit(setting, f"{source}='{setting}'")
    return _backends[setting]


def _requested_chips(num_chips: int | None) -> tuple[int | None, str]:
    """How many chips are asked for, and the setting that says so."""
    value = os.environ.get("TPU_NUM_DEVICES")
    if num_chips is not None or not value:
        return num_chips, "num_chips"
    if not value.isdecimal():
        raise UserError(f"TPU_NUM_DEVICES={value!r} is not a number of chips. Set it to 1, 4 or 8, or unset it.")
    return int(value), "TPU_NUM_DEVICES"


def prepare_processes(backend: Backend, num_chips: int | None) -> int:
    """
    Count the processes that a run is to have, with `num_chips` as in [`select_backend`]: one, or where a process drives one
    chip ([`Backend.chips_of_host`]), one for each chip. Where there are to be several, the environment is set up for them.
    """
    chips, setting = _requested_chips(num_chips)
    count = backend.chips_of_host if chips is None else chips
    if backend.chips_of_host == 1 or count == 1:
        return 1
    backend.prepare_processes(count, setting)
    return count


def choose_before_upstream() -> None:
    """
    Choose before transformers and trl are imported, which fix then what they do about torch_xla. Where the environment
    asks for what is absent, it is said to whoever makes a config or a trainer without naming a backend.
    """
    try:
        select_backend()
    except ValueError:
        _switch_off_upstream_xla()
        if not torch.cuda.is_available():
            _accept_bf16()


def select_tracing(num_chips: int, hosts: Sequence[Sequence[int]] = (), chip: Chip | None = None) -> Backend:
    """
    From now on choose XLA by which programs are traced for TPU chips, and none is run. `hosts` are the chips of each host,
    where there are several, and `chip` is their kind.
    """
    if not has_torch_xla():
        raise UserError(f"Ahead-of-time tracing needs torch_xla, which is not installed: {_install_xla()}")
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_chips)}
    from .xla.tracing import TracingBackend

    _backends["auto"] = _backends["xla"] = TracingBackend(num_chips, hosts, chip)
    return select_backend("xla")


def _xla(pjrt_device: str, reason: str) -> Backend:
    # torch_xla warns, when it is imported, that it chooses by itself.
    os.environ.setdefault("PJRT_DEVICE", pjrt_device)
    from .xla.backend import XLABackend

    return XLABackend(reason, pjrt_device)


def _torch_tpu(reason: str) -> Backend:
    from .torch_tpu.backend import TorchTPUBackend

    return TorchTPUBackend(reason)


def _finds_torch_tpu() -> bool:
    """Whether torch_tpu, which is loaded by `import torch` where it finds a chip, has a device in this process."""
    accelerator = torch.accelerator.current_accelerator() if has_torch_tpu() else None
    return accelerator is not None and accelerator.type == "tpu" and torch.accelerator.is_available()


def _choose() -> Backend:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in YES:
        return CPUBackend("ACCELERATE_USE_CPU is set")
    chips = tpu_chips()
    if _finds_torch_tpu():
        return _torch_tpu("torch_tpu has a device")
    pjrt_device = pjrt_device_asked_for()
    xla_allowed = has_torch_xla() and os.environ.get("USE_TORCH_XLA", "1").lower() not in NO
    if xla_allowed and chips and pjrt_device in (None, "TPU"):
        return _xla("TPU", f"{chips} TPU chip{'s' if chips > 1 else ''} found")
    if xla_allowed and pjrt_device:
        _check_pjrt_device(pjrt_device, chips)
        return _xla(pjrt_device, f"PJRT_DEVICE={pjrt_device} is set")
    if torch.cuda.is_available():
        return CUDABackend("CUDA is available")
    if chips:
        return CPUBackend(
            f"a TPU is attached but torch_xla is not used: {install_command('tpu')} (or {requirement('torch_tpu')} for "
            "torch_tpu, which TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps out), unset USE_TORCH_XLA"
        )
    if has_torch_xla():
        return CPUBackend("no TPU or GPU found; PJRT_DEVICE=CPU would compile with XLA for this CPU")
    if pjrt_device:
        return CPUBackend(
            f"no TPU or GPU found; PJRT_DEVICE={pjrt_device} is for torch_xla, which is not installed: {_install_xla()}"
        )
    return CPUBackend("no TPU or GPU found")


def _install_xla() -> str:
    """What to type for torch_xla, and where: pip would replace another torch."""
    where = ""
    if has_torch_tpu():
        where = ", in an environment of its own, beside that of torch_tpu"
    elif not torch.__version__.startswith("2.9."):
        where = ", in an environment of its own, since it brings torch 2.9"
    return install_command("tpu") + where


def _check_pjrt_device(pjrt_device: str, chips: int) -> None:
    if (mistake := find_pjrt_mistake(pjrt_device, chips)) is not None:
        raise UserError("{}. {}.".format(*mistake))


def _explicit(name: str, setting: str) -> Backend:
    if name == "tpu":
        if not has_torch_tpu():
            raise UserError(
                f"{setting} needs torch_tpu, which is not installed: {install_command('torch_tpu')}. torch_xla is "
                "backend='xla'."
            )
        if not _finds_torch_tpu():
            raise UserError(
                f"{setting} was asked for, but torch_tpu has no device in this process: it found no TPU chip when torch was "
                "imported, or TORCH_DEVICE_BACKEND_AUTOLOAD=0 kept it from looking. Use 'auto' to auto-detect, or 'cpu'."
            )
        return _torch_tpu(f"{setting} was asked for")
    if name == "xla":
        if not has_torch_xla():
            raise UserError(f"{setting} needs torch_xla, which is not installed: {_install_xla()}")
        chips = tpu_chips()
        pjrt_device = pjrt_device_asked_for() or ("TPU" if chips else "CPU")
        _check_pjrt_device(pjrt_device, chips)
        return _xla(pjrt_device, f"{setting} was asked for")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"{setting} was asked for, but torch.cuda.is_available() is False on this machine. Use 'auto' to "
                "auto-detect, or 'cpu'."
            )
        return CUDABackend(f"{setting} was asked for")
    return CPUBackend(f"{setting}, or use_cpu, was asked for")


def _switch_off_upstream_xla() -> None:
    """
    Make transformers and accelerate leave torch_xla alone; the trainers hand them the chosen device instead.

    Both take an XLA device whenever torch_xla can be imported, on a CUDA machine too, and then end the step at every
    gathered metric, read batches ahead in threads that upset the evaluation's bookkeeping, and set XLA_USE_BF16 on a TPU.
    Their one switch is `USE_TORCH_XLA`, which they read when they are imported (`transformers/utils/import_utils.py`,
    `accelerate/utils/imports.py`); where they were imported before, what they read is corrected. The variable itself is
    put back, so that child processes choose for themselves.
    """
    before = os.environ.get("USE_TORCH_XLA")
    os.environ["USE_TORCH_XLA"] = "0"
    try:
        import accelerate.utils.imports as accelerate_imports
        import transformers.utils.import_utils as transformers_imports
    finally:
        if before is None:
            del os.environ["USE_TORCH_XLA"]
        else:
            os.environ["USE_TORCH_XLA"] = before
    transformers_imports.USE_TORCH_XLA = "0"
    transformers_imports.is_torch_xla_available.cache_clear()
    accelerate_imports._torch_xla_available = False
    accelerate_imports.is_torch_xla_available.cache_clear()


def _accept_bf16() -> None:
    """
    Let upstream's arguments take `bf16=True`, TRL's default, on a machine without a GPU.

    `TrainingArguments` refuses it unless it sees a GPU, torch_xla or `use_cpu=True`, before any trainer is asked. XLA
    and the CPU both compute in bfloat16.
    """
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
