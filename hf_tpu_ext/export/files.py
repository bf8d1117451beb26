"""A directory that is there as a whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..atomic_write import move_into_place, remove_temporary
from ..errors import SaveError, UserError
from ..trainers.checkpoint.earlier_run import EXPORT_FILE
from ..trainers.checkpoint.run_lock import lock


# While an export is written, a file and a directory with these endings are beside it.
_LOCK, _TEMPORARY = ".hf_tpu_export.lock", ".hf_tpu_export"


@contextmanager
def only_export_to(output: Path) -> Iterator[None]:
    """Context of an export to a directory or a file. Raises `ValueError` while another one is in it."""
    output = output.absolute()
    fix = "Write to another place, or wait until that export has ended."
    with lock(output.with_name(f".{output.name}{_LOCK}"), f"Another export writes to {output}", fix):
        yield


def check_output(output_dir: Path, overwrite: bool, sources: list[Path]) -> None:
    """
    Raise a `ValueError` unless an export may take a directory's place: it is none of the `sources` that are read, of which the first
    is what was trained, and not there, or empty, or an earlier export that may be overwritten.
    """
    target = output_dir.resolve()
    for source in sources:
        if target in (source.resolve(), *source.resolve().parents):
            raise UserError(
                f"--output_dir {output_dir} holds {source}, which is exported. Give a directory of its own: --output_dir "
                f"{source / 'merged'}"
            )
    if not os.path.lexists(output_dir):
        return
    if not output_dir.is_dir() or output_dir.is_symlink():
        raise UserError(f"--output_dir {output_dir} is not a directory. Give another one.")
    if not any(output_dir.iterdir()):
        return
    if not (output_dir / EXPORT_FILE).is_file():
        raise UserError(
            f"--output_dir {output_dir} holds files that are no export (it has no {EXPORT_FILE}), which are left alone. "
            "Give another directory."
        )
    try:
        own_files = json.loads((output_dir / EXPORT_FILE).read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError):
        # An export of an older version has no list of its files.
        own_files = [EXPORT_FILE]
    if foreign := sorted({path.name for path in output_dir.iterdir()} - {*own_files}):
        names = ", ".join(foreign[:5]) + ", ..." * (len(foreign) > 5)
        raise UserError(
            f"--output_dir {output_dir} holds an export and files that it did not write: {names}. Move them away, or give "
            "another directory."
        )
    if not overwrite:
        written = (output_dir / EXPORT_FILE).stat().st_mtime
        newer = next((path for path in sources[0].glob("*model*.safetensors") if path.stat().st_mtime > written), None)
        age = (
            ""
            if newer is None
            else f" It is older than {newer}, and so of an earlier state of the run, or of another one."
        )
        raise UserError(f"{output_dir} holds an export already.{age} Add --overwrite, or give another --output_dir.")


@contextmanager
def whole_directory(output_dir: Path) -> Iterator[Path]:
    """
    Write a directory under another name, which is yielded, and give it its own at the end, in place of one that is
    there. It is removed where that is not reached. Raises `OSError` where it cannot be written. To be called in
    [`only_export_to`]: what has the other name is removed.
    """
    output_dir = output_dir.absolute()
    temporary = output_dir.with_name(f".{output_dir.name}{_TEMPORARY}")
    # Left behind by one that was killed.
    if temporary.exists():
        remove_temporary(temporary, output_dir)
    partial = temporary / output_dir.name
    try:
        partial.mkdir(parents=True)
        yield partial
        move_into_place(partial, output_dir)
    except SafetensorError as error:
        # What safetensors makes of a full disk.
        raise SaveError(
            f"{output_dir} cannot be written: {error}. Nothing of it was kept. Make room there, or give --output_dir on another "
            "disk."
        ) from error
    finally:
        # The disk may be gone altogether.
        with suppress(OSError):
            remove_temporary(temporary, output_dir)
