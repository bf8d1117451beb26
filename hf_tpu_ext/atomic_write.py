"""Files and directories that are whole or not there."""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """
    Write a file that is whole or not there, also after a loss of power; text as UTF-8. What was there before stays
    until then, and of several processes that write it at once one wins. Raises `OSError` where it cannot be written;
    nothing is left of the attempt.
    """
    path = Path(path)
    # Processes of several hosts may have one number.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        # The disk may be gone altogether.
        with suppress(OSError):
            partial.unlink()
        raise
    sync_directory(path.parent)


# Inside a temporary directory, what was there whose place the new directory takes.
_REPLACED = "replaced"


def move_into_place(source: Path, target: Path) -> None:
    """
    Give a directory that was written inside a temporary one, on the same disk, its name `target`. What has the name
    goes to the temporary directory, for [`remove_temporary`].
    """
    if target.exists():
        os.rename(target, source.with_name(_REPLACED))
    os.rename(source, target)
    sync_directory(target.parent)


def remove_temporary(temporary: Path, target: Path) -> None:
    """
    Remove a temporary directory with what was written in it, whose place was to be `target`. If [`move_into_place`]
    came half-way, what was to be replaced gets its name back first.
    """
    old_files = temporary / _REPLACED
    if old_files.exists() and not target.exists():
        os.rename(old_files, target)
    shutil.rmtree(temporary)


def sync_directory(path: str | Path) -> None:
    """Bring to the disk which files a directory has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Not every file system can do this for a directory.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
