"""The machine around an accelerator: its memory pages, who holds its chips, and processes forked beside its runtime."""

import multiprocessing
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from ..yes_no import NO


HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Turns transparent hugepages on until the machine is restarted.
HUGEPAGES_COMMAND = f"sudo sh -c 'echo always > {HUGEPAGES}'"
#: libtpu makes it when it starts, and removes it when its process ends by itself.
LOCK_FILE = Path("/tmp/libtpu_lockfile")
_CHIP_FILE = re.compile(r"/dev/(accel\d+|vfio/\d+)")
_PARALLELISM = "TOKENIZERS_PARALLELISM"
# What the tokenizers library takes for "no" in that variable.
_NO = {"", *NO}


def hugepages_setting(path: Path = HUGEPAGES) -> str | None:
    """When the kernel uses transparent hugepages: `"always"`, `"madvise"`, `"never"`; `None` where it has none."""
    try:
        match = re.search(r"\[(\w+)\]", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match and match[1]


def enable_hugepages(path: Path = HUGEPAGES) -> list[str]:
    """
    Turn transparent hugepages on, if this process may: the TPU runtime then starts and stops faster, on v5e and newer.
    Returns a line that says what was done or is to be done; none where they are on.
    """
    setting = hugepages_setting(path)
    if setting in (None, "always"):
        return []
    try:
        path.write_text("always", encoding="utf-8")
    except OSError:
        return [f"Transparent hugepages are {setting}; the TPU runtime starts faster with: {HUGEPAGES_COMMAND}"]
    return [f"Transparent hugepages were {setting} and are always from now on: the TPU runtime starts faster"]


@dataclass(frozen=True)
class ChipHolder:
    """A process that has opened the files of TPU chips, each of which belongs to one process at a time."""

    pid: int
    command: str
    chips: list[str]


def find_chip_holders(proc: Path = Path("/proc")) -> tuple[list[ChipHolder], int]:
    """
    The processes that have opened a TPU chip, except for this one, and how many others cannot be looked at: somebody
    else's. psutil lists only the regular files that a process has opened, and a chip's is a device.
    """
    holders, hidden = [], 0
    for process in proc.glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            files = {os.readlink(file) for file in (process / "fd").iterdir()}
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except PermissionError:
            hidden += 1
            continue
        except FileNotFoundError:
            # It has ended, or closed a file, meanwhile.
            continue
        if chips := sorted(file for file in files if _CHIP_FILE.fullmatch(file)):
            holders.append(ChipHolder(int(process.name), command, chips))
    return sorted(holders, key=lambda holder: holder.pid), hidden


def let_forks_tokenize(num_workers: int, start_method: str | None) -> list[str]:
    """
    Keep the workers of a dataloader from waiting forever for threads that they do not have. Returns a line if it had
    to.

    A fork of a process has one of its threads. Told by `TOKENIZERS_PARALLELISM=true` to use the others, a tokenizer in
    a fork waits for them. Where the variable is not set, the tokenizers library tells a fork by itself.
    """
    value = os.environ.get(_PARALLELISM)
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if not num_workers or (start_method or default) != "fork" or value is None or value.lower() in _NO:
        return []
    os.environ[_PARALLELISM] = "false"
    return [
        f"{_PARALLELISM}={value} is false from now on: a tokenizer in a forked dataloader worker would wait for threads that "
        "are not there"
    ]


def peak_of_process() -> int:
    """The most bytes that this process had in memory at once."""
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
