"""The machine: memory pages, room on disks and in memory, and the compiled programs on disk."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from ..backends.compile_cache import MOST_BYTES, cache_root, cache_state
from ..backends.detect import tpu_chips
from ..backends.host import HUGEPAGES, HUGEPAGES_COMMAND, hugepages_setting
from ..formatting import count, format_bytes
from .accelerator import check_backend, check_tpu
from .check import Check
from .versions import check_libtpu, check_versions


#: Bytes below which a disk or the memory is too small for a model of half a billion parameters.
LEAST_DISK = 5 * 10**9
LEAST_MEMORY = 4 * 10**9


def check_hugepages(has_tpu: bool, path: Path = HUGEPAGES) -> Check:
    """Look whether transparent hugepages are on, which speed up the runtime of a TPU."""
    setting = hugepages_setting(path)
    if setting is None:
        return Check("hugepages", "none", "this kernel has no transparent hugepages")
    if not has_tpu:
        return Check("hugepages", "none", f"{setting}; they matter to a TPU")
    if setting == "always":
        return Check("hugepages", "ok", setting)
    if os.access(path, os.W_OK):
        return Check("hugepages", "ok", f"{setting}; a run turns them on")
    return Check("hugepages", "failed", f"{setting}: the TPU runtime starts and stops slowly", HUGEPAGES_COMMAND)


def places() -> dict[str, Path]:
    """The directories that a run writes much to, by the setting that moves them elsewhere."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return {"output_dir": Path.cwd(), "HF_HOME": home, "TMPDIR": Path(os.environ.get("TMPDIR") or "/tmp")}


def check_disk(directories: Mapping[str, Path], least: int = LEAST_DISK) -> list[Check]:
    """Look how much room there is on each disk of some directories, named by the setting that moves them elsewhere."""
    disks: dict[int, tuple[int, list[str], Path]] = {}
    for name, directory in directories.items():
        place = next(path for path in (directory, *directory.parents) if path.is_dir())
        _, names, _ = disks.setdefault(place.stat().st_dev, (shutil.disk_usage(place).free, [], place))
        names.append(name)
    checks = []
    for free, names, place in disks.values():
        text = f"{format_bytes(free)} free in {place} ({', '.join(names)})"
        if free >= least:
            checks.append(Check("disk", "ok", text))
        else:
            fix = f"Make room ({format_bytes(least)} are little), or set {' or '.join(names)} to another disk"
            checks.append(Check("disk", "failed", text, fix))
    return checks


def check_memory(least: int = LEAST_MEMORY) -> Check:
    """Look how much memory there is."""
    available = psutil.virtual_memory().available
    text = f"{format_bytes(available)} available"
    if available >= least:
        return Check("memory", "ok", text)
    fix = f"End other programs: models are loaded there ({format_bytes(least)} are little)"
    return Check("memory", "failed", text, fix)


def check_compile_cache(has_tpu: bool, setting: str = "auto") -> Check:
    """
    Look at the compiled programs on disk, which are kept for a TPU without being asked to. `setting` is as
    `compile_cache_dir`.
    """
    name = "compile cache"
    root, chosen = cache_root(setting)
    if root is None:
        return Check(name, "none", "off")
    state = cache_state(root)
    if not state.writable:
        fix = "Set HF_TPU_EXT_COMPILE_CACHE to a directory that you may write to, or to off"
        return Check(name, "failed", f"{root} cannot be written: every run compiles from scratch", fix)
    if not has_tpu and not chosen:
        return Check(name, "none", f"used on a TPU, in {root}")
    text = f"{count(state.programs, 'executable')}, {format_bytes(state.size)} of at most {format_bytes(MOST_BYTES)}, in {root}"
    return Check(name, "ok", text)


def examine_machine() -> Iterator[Check]:
    """Look at the packages and the machine, in the order in which it is shown. PyTorch is imported in another process."""
    has_tpu = tpu_chips() > 0
    yield from check_versions(has_tpu)
    yield check_libtpu(has_tpu)
    yield from check_tpu()
    yield check_backend(has_tpu)
    yield check_hugepages(has_tpu)
    yield from check_disk(places())
    yield check_memory()
    yield check_compile_cache(has_tpu)
