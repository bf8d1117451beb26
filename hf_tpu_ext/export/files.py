"""A directory that is there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..formatting import format_bytes


#: What an export says about itself, and what tells a directory as one.
REPORT_FILE = "export.json"
# Tokenizer, configuration and rounding.
_ROOM_TO_SPARE = 64 * 2**20


def check_output(output_dir: Path, overwrite: bool, sources: list[Path]) -> None:
    """
    Raise a `ValueError` unless an export may take a directory's place: it is none of those that are read, and not
    there, or empty, or an earlier export that may be overwritten.
    """
    target = output_dir.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise ValueError(
                f"--output_dir {output_dir} holds {source}, which is exported. Give a directory of its own: --output_dir "
                f"{source / 'merged'}"
            )
    if not os.path.lexists(output_dir):
        return
    if not output_dir.is_dir() or output_dir.is_symlink():
        raise ValueError(f"--output_dir {output_dir} is not a directory. Give another one.")
    if not any(output_dir.iterdir()):
        return
    if not (output_dir / REPORT_FILE).is_file():
        raise ValueError(
            f"--output_dir {output_dir} holds files that are no export (it has no {REPORT_FILE}), which are left alone. "
            "Give another directory."
        )
    if not overwrite:
        raise ValueError(
            f"--output_dir {output_dir} holds an export already. Add --overwrite, or give another directory."
        )


def check_room(output_dir: Path, size: int) -> None:
    """Raise a `ValueError` unless the disk of a directory, which need not be there, has room for so many bytes."""
    place = next(parent for parent in output_dir.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < size + _ROOM_TO_SPARE:
        raise ValueError(
            f"The weights take {format_bytes(size)}, and {place} has {format_bytes(free)} left. Make room there, give "
            "--output_dir on another disk, or a smaller --dtype (bfloat16)."
        )


@contextmanager
def whole_directory(output_dir: Path) -> Iterator[Path]:
    """
    Write a directory under another name, which is yielded, and give it its own at the end, in place of one that is
    there. It is removed where that is not reached. Raises `OSError` where it cannot be written.
    """
    output_dir = output_dir.absolute()
    partial, old = (output_dir.with_name(f".{output_dir.name}.{suffix}") for suffix in ("partial", "old"))
    # Left behind by one that was killed.
    for directory in (partial, old):
        shutil.rmtree(directory, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if output_dir.exists():
            os.replace(output_dir, old)
        os.replace(partial, output_dir)
    except SafetensorError as error:
        # What safetensors makes of a full disk.
        raise OSError(f"{output_dir} cannot be written: {error}. Nothing of it was kept.") from error
    finally:
        for directory in (partial, old):
            shutil.rmtree(directory, ignore_errors=True)
