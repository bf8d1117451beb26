"""
Compiled programs that outlive a process. The runtime stores and loads them; what it leaves out is here: where they are
kept, which of them are whole, how long each took to compile, and how many there may be.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic_write import write_atomically


VARIABLE = "HF_TPU_EXT_COMPILE_CACHE"
#: Bytes that programs may take, those of other toolchains included. The ones that were not used for longest go first.
MOST_BYTES = 20 * 2**30
_TOOLCHAIN_FILE = "toolchain.json"
# Environment variables of torch_xla that differ between processes which compile alike.
_NOT_OF_THE_TOOLCHAIN = ("XLA_FNTRACKER_", "XLA_PERSISTENT_CACHE_", "XLA_COORDINATOR_PORT", "XLA_USE_SPMD")


def cache_root(setting: str) -> tuple[Path | None, bool]:
    """
    Decide where compiled programs are kept.

    Args:
        setting (`str`):
            `"auto"`, `"off"` or a directory. `"auto"` is what the environment variable `HF_TPU_EXT_COMPILE_CACHE` says, or
            a directory of the user's.

    Returns:
        `tuple[Path | None, bool]`: The directory, or `None` for none; and whether a person chose it.

    Raises:
        `ValueError`: The setting is empty.
    """
    chosen = (os.environ.get(VARIABLE) or "auto") if setting == "auto" else setting
    if not chosen:
        raise ValueError("compile_cache_dir is empty. Set it to 'auto', to 'off' or to a directory.")
    if chosen == "off":
        return None, True
    if chosen == "auto":
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_tpu_ext" / "compile", False
    return Path(chosen).expanduser().absolute(), True


def compiler_settings() -> dict[str, str]:
    """
    Environment variables that may change what is compiled.

    Returns:
        `dict[str, str]`: Their values, by name.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("XLA_", "LIBTPU_INIT_ARGS")) and not name.startswith(_NOT_OF_THE_TOOLCHAIN)
    }


def library_id(path: str) -> str:
    """
    Tell one build of a library from another, without reading all of it.

    Args:
        path (`str`):
            The library, an ELF file whose first page holds the id of its build (libtpu is one).

    Returns:
        `str`: Its size and a hash of its first page.
    """
    with open(path, "rb") as library:
        return f"{os.path.getsize(path)} {hashlib.sha256(library.read(4096)).hexdigest()}"


@dataclass(frozen=True)
class CacheUse:
    """
    What a process has had of its [`CompileCache`] so far.

    Args:
        directory (`Path`):
            Where the programs are.
        programs (`int`):
            How many there are.
        size (`int`):
            Their bytes.
        hits (`int`):
            Programs that were loaded.
        misses (`int`):
            Programs that were not there, and were compiled.
        unreadable (`int`):
            Programs that were there and could not be loaded, and were compiled.
        compile_seconds (`float`):
            Seconds spent in compiling.
        saved_seconds (`float`, *optional*):
            What the loaded programs took to compile when they were stored, less what loading them took. `None` where it
            is not known.
        problem (`str`, *optional*):
            Why programs cannot be stored.
    """

    directory: Path
    programs: int
    size: int
    hits: int
    misses: int
    unreadable: int
    compile_seconds: float
    saved_seconds: float | None
    problem: str | None


@dataclass(frozen=True)
class _Entry:
    path: Path
    size: int
    written: int
    # Whether it was read since `_forget_use`.
    used: bool

    @property
    def note(self) -> Path:
        return self.path.with_suffix(".json")

    def read_note(self) -> dict[str, Any]:
        try:
            return json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}


class CompileCache:
    """
    A directory of compiled programs of one toolchain.

    The runtime writes a program under its key, a number. Beside it goes a note, `<key>.json`, with its size and the seconds
    that it took to compile. The note comes last, so a program without one or of another size was left behind by a process
    that was stopped, and is removed. The time of a note is when its program was last used.

    Args:
        root (`Path`):
            Directory of all toolchains.
        name (`str`):
            Name of the toolchain.
        toolchain (`dict[str, Any]`):
            What programs depend on besides their keys, as JSON.

    Raises:
        `OSError`: The directory is not there and cannot be made.
    """

    def __init__(self, root: Path, name: str, toolchain: dict[str, Any]):
        text = json.dumps(toolchain, indent=2, sort_keys=True)
        self.directory = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        self.problem: str | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self.directory / _TOOLCHAIN_FILE, text)
        except OSError as error:
            if not self.directory.is_dir():
                raise
            self.problem = error.strerror
        #: Whether programs can be loaded, but none stored.
        self.read_only = self.problem is not None
        if not self.read_only:
            _remove_incomplete(self.directory)
            _make_room(root)
            for entry in _entries(self.directory):
                _forget_use(entry)
        self._noted = {entry.path.name: entry.written for entry in _entries(self.directory)}

    def note(self, compile_seconds: list[float]) -> None:
        """
        Write the notes of the programs that were stored since the last call.

        Args:
            compile_seconds (`list[float]`):
                Seconds of each compilation since the last call, in their order.
        """
        if self.read_only:
            return
        new = [entry for entry in _entries(self.directory) if self._noted.get(entry.path.name) != entry.written]
        # If another process has stored programs as well, it is not known which took how long.
        seconds = compile_seconds if len(compile_seconds) == len(new) else [None] * len(new)
        for entry, value in zip(new, seconds, strict=True):
            self._noted[entry.path.name] = entry.written
            try:
                write_atomically(entry.note, json.dumps({"bytes": entry.size, "seconds": value}))
                _forget_use(entry)
            except OSError as error:
                # A full disk: the program is cut off, too.
                self.problem = error.strerror
                entry.path.unlink(missing_ok=True)

    def use(self, hits: int, misses: int, unreadable: int, compile_seconds: float, load_seconds: float) -> CacheUse:
        """
        Sum up what this process has had of the cache, and note which programs it used.

        Args:
            hits (`int`):
                As in [`CacheUse`].
            misses (`int`):
                As in [`CacheUse`].
            unreadable (`int`):
                As in [`CacheUse`].
            compile_seconds (`float`):
                As in [`CacheUse`].
            load_seconds (`float`):
                Seconds spent in loading programs.

        Returns:
            [`CacheUse`]: The sums.
        """
        entries = _entries(self.directory)
        used = [entry for entry in entries if entry.used]
        if not self.read_only:
            for entry in used:
                with suppress(FileNotFoundError):
                    os.utime(entry.note)
        # Which programs were loaded is told by the time of their last access. A file system need not keep that, and
        # another process may have loaded some.
        took = [entry.read_note().get("seconds") for entry in used]
        known = len(took) == hits and None not in took
        return CacheUse(
            directory=self.directory,
            programs=len(entries),
            size=sum(entry.size for entry in entries),
            hits=hits,
            misses=misses,
            unreadable=unreadable,
            compile_seconds=compile_seconds,
            saved_seconds=0.0 if not hits else sum(took) - load_seconds if known else None,
            problem=self.problem,
        )


@dataclass(frozen=True)
class CacheState:
    """
    What a directory of compiled programs holds.

    Args:
        programs (`int`):
            Programs of all toolchains.
        size (`int`):
            Their bytes.
        incomplete (`int`):
            Programs that were not written to their end.
        writable (`bool`):
            Whether there can be more.
    """

    programs: int
    size: int
    incomplete: int
    writable: bool


def cache_state(root: Path) -> CacheState:
    """
    Look at a directory of compiled programs. Nothing in it is changed.

    Args:
        root (`Path`):
            The directory, which need not be there.

    Returns:
        [`CacheState`]: What it holds.
    """
    entries = [entry for path in root.glob(f"*/{_TOOLCHAIN_FILE}") for entry in _entries(path.parent)]
    incomplete = [entry for entry in entries if entry.read_note().get("bytes") != entry.size]
    place = next(path for path in (root, *root.parents) if path.exists())
    writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    return CacheState(len(entries) - len(incomplete), sum(entry.size for entry in entries), len(incomplete), writable)


def _entries(directory: Path) -> list[_Entry]:
    """The programs in a directory, in the order in which they were written."""
    entries = []
    for path in directory.glob("[0-9]*"):
        # Another process may remove one meanwhile.
        with suppress(FileNotFoundError):
            if path.name.isdecimal():
                stat = path.stat()
                entries.append(_Entry(path, stat.st_size, stat.st_mtime_ns, stat.st_atime_ns > 0))
    return sorted(entries, key=lambda entry: entry.written)


def _forget_use(entry: _Entry) -> None:
    with suppress(FileNotFoundError):
        os.utime(entry.path, ns=(0, entry.written))


def _remove_incomplete(directory: Path) -> None:
    for entry in _entries(directory):
        if entry.read_note().get("bytes") != entry.size:
            entry.path.unlink(missing_ok=True)


def _make_room(root: Path) -> None:
    found = []
    for toolchain in root.glob(f"*/{_TOOLCHAIN_FILE}"):
        for entry in _entries(toolchain.parent):
            with suppress(FileNotFoundError):
                found.append((entry.note.stat().st_mtime_ns, entry))
    size = 0
    for _, entry in sorted(found, key=lambda item: item[0], reverse=True):
        size += entry.size
        if size > MOST_BYTES:
            entry.path.unlink(missing_ok=True)
            entry.note.unlink(missing_ok=True)
