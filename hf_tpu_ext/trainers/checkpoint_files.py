"""Checkpoints on disk: written beside their place and moved there whole, checked before they are resumed from."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..atomic_write import sync_directory, write_atomically


MANIFEST_NAME = "manifest.json"
# Upstream takes directories `checkpoint-*` for checkpoints, and leaves `_*` out when it pushes the directory of a run.
_TEMPORARY = "_tmp-"


def checkpoints_by_step(run_dir: str | Path) -> dict[int, Path]:
    """List the checkpoint directories of a run by the number in their name, ascending."""
    found = {}
    for path in Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name) and path.is_dir():
            found[int(path.name.rpartition("-")[2])] = path
    return dict(sorted(found.items()))


def temporary_dir(checkpoint: Path) -> Path:
    """Name the directory beside a checkpoint's place that it is written in."""
    return checkpoint.with_name(_TEMPORARY + checkpoint.name)


def remove_leftovers(run_dir: str | Path) -> None:
    """Remove what a process left when it was killed while it wrote or deleted a checkpoint."""
    for path in Path(run_dir).glob(f"{_TEMPORARY}{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(path)


def seal(directory: Path) -> None:
    """Bring a checkpoint to the disk, with a manifest of the size and the SHA-256 of each of its files."""
    files, directories = {}, []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            directories.append(path)
            continue
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[path.relative_to(directory).as_posix()] = {"size": path.stat().st_size, "sha256": digest}
    for path in reversed(directories):
        sync_directory(path)
    # Brings the directory itself to the disk, too.
    write_atomically(directory / MANIFEST_NAME, json.dumps({"files": files}, indent=1))


def move_into_place(written: Path, checkpoint: Path) -> None:
    """Give a sealed checkpoint inside [`temporary_dir`] its name, atomically, in place of what is there."""
    if checkpoint.exists():
        os.rename(checkpoint, written.with_name("replaced"))
    os.rename(written, checkpoint)
    sync_directory(checkpoint.parent)


def find_damage(checkpoint: Path) -> str | None:
    """
    Say which file of a checkpoint is damaged, and how; `None` for a whole one. Each file is read once.

    One without a manifest (of stock TRL, or of transformers) is taken for whole if its state, which is written last,
    can be read.
    """
    try:
        return _damage_by_manifest(checkpoint) or _damage_of_state(checkpoint / TRAINER_STATE_NAME)
    except OSError as error:
        name = Path(error.filename).name if error.filename else checkpoint.name
        return f"{name} cannot be read ({error.strerror})"


def _damage_by_manifest(checkpoint: Path) -> str | None:
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        return None
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (checkpoint / name, entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_NAME} is damaged"
    for name, (path, size, _) in expected.items():
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for name, (path, _, digest) in expected.items():
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} does not match its SHA-256"
    return None


def _damage_of_state(state: Path) -> str | None:
    if not state.is_file():
        return f"{state.name} is missing, so the checkpoint is incomplete"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return f"{state.name} is truncated, so the checkpoint is incomplete"
    return None


def delete_old(run_dir: str | Path, newest: Path, limit: int | None, best: str | None) -> None:
    """
    Delete the oldest checkpoints, down to `limit` (`save_total_limit`), except the newest, which was just written, and
    the best.

    Upstream goes by the time of their last change. Here the number in their name counts, whatever the clock does; one
    that is higher than the newest's was left by another run, and goes first.
    """
    if not limit or limit < 0:
        return
    found = checkpoints_by_step(run_dir)
    step = next(step for step, path in found.items() if path == newest)
    kept = {newest} if best is None else {newest, Path(best)}
    oldest_first = sorted(found, key=lambda other: (other <= step, other))
    surplus = len(found) - max(limit, len(kept))
    for path in [found[other] for other in oldest_first if found[other] not in kept][: max(0, surplus)]:
        # Renamed first: half a checkpoint never has the name of one.
        os.rename(path, temporary_dir(path))
        shutil.rmtree(temporary_dir(path))
