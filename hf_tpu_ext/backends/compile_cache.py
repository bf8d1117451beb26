"""Compiled programs that outlive a process. The runtime stores and loads them; here is where, and how many there may be."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic_write import write_atomically
from ..errors import UserError


VARIABLE = "HF_TPU_EXT_COMPILE_CACHE"
#: Bytes that programs may take, those of other toolchains included. The ones that were read longest ago go first.
MOST_BYTES = 20 * 2**30
_TOOLCHAIN_FILE = "toolchain.json"
# Environment variables of torch_xla that differ between processes which compile the same programs.
_NOT_OF_THE_TOOLCHAIN = ("XLA_FNTRACKER_", "XLA_PERSISTENT_CACHE_", "XLA_COORDINATOR_PORT", "XLA_USE_SPMD")


def cache_root(setting: str) -> tuple[Path | None, bool]:
    """
    The directory of compiled programs (`None`: there is none), and whether a person chose it.

    `setting` is `"off"`, a directory or `"auto"`: what the environment variable `HF_TPU_EXT_COMPILE_CACHE` says, or a
    directory of the user's. Raises `ValueError` if it is empty or an address, or the user has no home directory.
    """
    value = (os.environ.get(VARIABLE) or "auto") if setting == "auto" else setting
    if not value:
        raise UserError("compile_cache_dir is empty. Set it to 'auto', to 'off' or to a directory.")
    if value == "off":
        return None, True
    if value == "auto":
        return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hf_tpu_ext" / "compile", False
    if "://" in value:
        raise UserError(
            f"compile_cache_dir={value} is an address, which would be a directory of that name on the local disk. Mount the bucket, and "
            f"set compile_cache_dir, or {VARIABLE}, to a directory in it, for example compile_cache_dir=/mnt/bucket/compile."
        )
    return _expand(value).absolute(), True


def _expand(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"There is no home directory for {path}, where compiled programs are kept: HOME is not set, as in some containers. "
            f"Set HOME, or {VARIABLE} to a directory or to off."
        ) from error


def compiler_settings() -> dict[str, str]:
    """Environment variables that may change what is compiled, with their values."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("XLA_", "LIBTPU_INIT_ARGS")) and not name.startswith(_NOT_OF_THE_TOOLCHAIN)
    }


def library_id(path: str) -> str:
    """Size of a library and a hash of its first page, which holds the id of its build (in an ELF file, as libtpu is)."""
    with open(path, "rb") as library:
        return f"{os.path.getsize(path)} {hashlib.sha256(library.read(4096)).hexdigest()}"


@dataclass(frozen=True)
class CacheUse:
    """What a process has had of its [`CompileCache`] so far."""

    directory: Path
    #: Programs in it, and their bytes.
    programs: int
    size: int
    hits: int
    misses: int
    #: Programs that were there and could not be loaded, and were compiled.
    unreadable: int
    compile_seconds: float
    #: Why programs cannot be stored.
    problem: str | None


class CompileCache:
    """
    A directory of compiled programs of one toolchain, below that of all toolchains. The runtime writes each under its
    key, a number; `toolchain` is what they depend on besides, as JSON. Raises `OSError` if it cannot be made.
    """

    def __init__(self, root: Path, name: str, toolchain: dict[str, Any]):
        text = json.dumps(toolchain, indent=2, sort_keys=True)
        self.directory = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        #: Why programs can be loaded, but none stored.
        self.problem: str | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / _TOOLCHAIN_FILE, text)
        except OSError as error:
            if not self.directory.is_dir():
                raise
            self.problem = error.strerror
            return
        size = 0
        for program, stat in sorted(_programs(root), key=lambda item: item[1].st_atime, reverse=True):
            size += stat.st_size
            if size > MOST_BYTES:
                # Another user's, in a directory that several share, stays.
                with suppress(OSError):
                    program.unlink(missing_ok=True)

    @classmethod
    def open(cls, root: Path, name: str, toolchain: dict[str, Any]) -> "tuple[CompileCache | None, list[str]]":
        """Make it, or not where that cannot be, with lines on what does not work."""
        try:
            cache = cls(root, name, toolchain)
        except OSError as error:
            return None, [
                f"The compilation cache is off: {root} cannot be made ({error.strerror}). Set compile_cache_dir to another "
                "directory, or to off"
            ]
        problem = f"{cache.directory} cannot be written ({cache.problem}): it is used read-only"
        return cache, [] if cache.problem is None else [problem]

    def use(self, **counts: Any) -> CacheUse:
        """What this process has had of it: the `counts` are what the runtime says."""
        state = cache_state(self.directory.parent, self.directory.name)
        return CacheUse(self.directory, state.programs, state.size, problem=self.problem, **counts)


@dataclass(frozen=True)
class CacheState:
    """What a directory of compiled programs holds: how many, their bytes, and whether there can be more."""

    programs: int
    size: int
    writable: bool


def cache_state(root: Path, toolchain: str = "*") -> CacheState:
    """Look at a directory of compiled programs, which need not be there. Nothing in it is changed."""
    sizes = [stat.st_size for _, stat in _programs(root, toolchain)]
    place = next(path for path in (root, *root.parents) if path.exists())
    return CacheState(len(sizes), sum(sizes), place.is_dir() and os.access(place, os.W_OK | os.X_OK))


def _programs(root: Path, toolchain: str = "*") -> list[tuple[Path, os.stat_result]]:
    """The programs of all toolchains, or of one."""
    programs = []
    for file in root.glob(f"{toolchain}/{_TOOLCHAIN_FILE}"):
        # Of torch_xla, and of torch_tpu, below a directory for each kind of device.
        for path in (*file.parent.glob("[0-9]*"), *file.parent.glob("*/*.bin")):
            # Another process may remove one meanwhile.
            with suppress(FileNotFoundError):
                if path.name.isdecimal() or path.suffix == ".bin":
                    programs.append((path, path.stat()))
    return programs
