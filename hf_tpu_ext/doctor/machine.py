"""The machine: its accelerator and who holds it, compiled programs on disk."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import Signals

from ..backends.compile_cache import MOST_BYTES, cache_root, cache_state
from ..backends.detect import PCI_ROOT, TPU_BACKENDS, find_pjrt_mistake, pjrt_device_asked_for, tpu_chips, tpu_kind
from ..backends.host import LOCK_FILE, find_chip_holders
from ..formatting import count, format_bytes
from ..installing import install_command
from .check import Check
from .versions import check_libtpu, check_versions


# Importing torch and torch_xla takes seconds.
_TIMEOUT = 120
_CHOOSE = """
import json
from hf_tpu_ext.backends import select_backend
backend = select_backend()
print(json.dumps([backend.name, backend.reason]))
"""


def examine_machine() -> Iterator[Check]:
    """Look at the packages and the machine, in the order in which it is shown. PyTorch is imported in another process."""
    has_tpu = tpu_chips() > 0
    yield from check_versions(has_tpu)
    yield check_libtpu(has_tpu)
    yield from check_tpu()
    yield check_backend(has_tpu)
    yield check_compile_cache(has_tpu)


def check_tpu(pci_root: str = PCI_ROOT, proc: Path = Path("/proc"), lock_file: Path = LOCK_FILE) -> Iterator[Check]:
    """Look for TPU chips, and for processes that hold them."""
    chips = tpu_chips(pci_root)
    if not chips:
        yield Check("TPU", "none", "none is attached to this machine")
        return
    yield Check("TPU", "ok", f"{count(chips, 'chip')}, {tpu_kind(pci_root)}")
    holders, hidden = find_chip_holders(proc)
    for holder in holders:
        text = f"{', '.join(holder.chips)} by process {holder.pid}: {holder.command}"
        fix = f"Wait for it, or end it: kill {holder.pid}. Or give each its own chips: TPU_VISIBLE_CHIPS"
        yield Check("TPU in use", "failed", text, fix)
    if not holders and not hidden and lock_file.exists():
        text = f"{lock_file} was left behind by a process that was killed"
        yield Check("TPU in use", "failed", text, f"sudo rm {lock_file}")
    elif not holders:
        unseen = f"; {hidden} processes of others cannot be looked at (sudo hf-tpu doctor --no_smoke can)"
        yield Check("TPU in use", "ok", "by no process" + unseen * bool(hidden))


def check_backend(has_tpu: bool, command: Sequence[str] = (sys.executable, "-c", _CHOOSE)) -> Check:
    """
    Find out what a run would train on, in a process of its own: PyTorch may not survive being imported. `command`
    prints the backend's name and why it was chosen.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        fix = "Look whether the disk of the environment is slow or full, and try again"
        return Check("backend", "failed", f"PyTorch was not imported within {_TIMEOUT} s", fix)
    if result.returncode:
        mistake = find_pjrt_mistake(pjrt_device_asked_for(), int(has_tpu))
        if mistake is not None and mistake[0] in result.stderr:
            return Check("backend", "failed", *mistake)
        return Check("backend", "failed", *explain_end(result.returncode, result.stderr))
    name, reason = json.loads(result.stdout.splitlines()[-1])
    text = f"{name}: {reason}"
    if has_tpu and name not in TPU_BACKENDS:
        fix = f"{install_command('tpu')}; unset PJRT_DEVICE, USE_TORCH_XLA, HF_TPU_EXT_BACKEND"
        return Check("backend", "failed", text, fix)
    return Check("backend", "ok", text)


def explain_end(status: int, output: str) -> tuple[str, str]:
    """Say how a process with this exit status, negative for a signal, came to a bad end, and what to do."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it wrote nothing"
    if status == -Signals.SIGKILL:
        return "killed by the system (SIGKILL), probably out of memory", "Close other programs and try again"
    if status < 0:
        return (
            f"crashed ({Signals(-status).name}): {last}",
            f"torch, torch_xla and libtpu of versions that do not match crash: {install_command('tpu', '--force-reinstall')}",
        )
    if "ModuleNotFoundError" in last or "ImportError" in last or "undefined symbol" in last:
        return last, f"{install_command('tpu', '--force-reinstall')}, on a GPU or CPU without [tpu]"
    return last, "Do what the message says; with --json FILE, all that a training has written is kept"


def check_compile_cache(has_tpu: bool) -> Check:
    """Look at the compiled programs on disk, which a TPU has by default."""
    name = "compile cache"
    root, is_explicit = cache_root("auto")
    if root is None:
        return Check(name, "none", "off")
    state = cache_state(root)
    if not state.writable:
        fix = "Set HF_TPU_EXT_COMPILE_CACHE to a directory that you may write to, or to off"
        return Check(name, "failed", f"{root} cannot be written: every run compiles from scratch", fix)
    if not has_tpu and not is_explicit:
        return Check(name, "none", f"used on a TPU, in {root}")
    text = f"{count(state.programs, 'executable')}, {format_bytes(state.size)} of at most {format_bytes(MOST_BYTES)}, in {root}"
    return Check(name, "ok", text)
