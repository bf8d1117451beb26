"""Whether a checkpoint is whole: its manifest, written with it, and what the formats of files say without one."""

import hashlib
import json
import os
import shlex
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ...atomic_write import sync_directory, write_atomically


logger = logging.get_logger(__name__)

MANIFEST_NAME = "manifest.json"


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


def find_damage(checkpoint: Path, by_manifest: bool = True) -> str | None:
    """
    Say which file of a checkpoint is damaged, and how; `None` for a whole one. Each file is read once.

    One without a manifest (of stock TRL, or of transformers), or not looked at `by_manifest`, is taken for whole if its state, which is
    written last, can be read, and no file was cut short.
    """
    try:
        if by_manifest and (checkpoint / MANIFEST_NAME).is_file():
            damage = _damage_by_manifest(checkpoint)
        else:
            damage = next(filter(None, map(_damage_by_format, sorted(checkpoint.glob("*")))), None)
        return damage or _damage_of_state(checkpoint / TRAINER_STATE_NAME)
    except OSError as error:
        name = Path(error.filename).name if error.filename else checkpoint.name
        return f"{name} cannot be read ({error.strerror})"


def how_to_accept(checkpoint: Path) -> str:
    """
    A sentence, behind another, on how to take a checkpoint as it is that is damaged by its manifest alone: all files are there, and
    whole by their formats. Of any other, no sentence.
    """
    manifest = checkpoint / MANIFEST_NAME
    if not os.access(manifest, os.R_OK) or find_damage(checkpoint, by_manifest=False) is not None:
        return ""
    if not all(path.is_file() for path, _, _ in (_expected_files(checkpoint) or {}).values()):
        return ""
    return (
        f" If it was changed on purpose, accept it as it is by removing its manifest: rm {shlex.quote(str(manifest))}"
    )


def _expected_files(checkpoint: Path) -> dict[str, tuple[Path, int, str]] | None:
    """By its name, each file that a manifest lists, its size and its SHA-256; `None` where the manifest is damaged."""
    try:
        files = json.loads((checkpoint / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
        return {name: (checkpoint / name, entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _damage_by_manifest(checkpoint: Path) -> str | None:
    expected_files = _expected_files(checkpoint)
    if expected_files is None:
        return f"{MANIFEST_NAME} is damaged"
    missing = {name for name, (path, _, _) in expected_files.items() if not path.is_file()}
    if missing:
        if not _weights_are_in_other_files(checkpoint, missing, set(expected_files)):
            return f"{min(missing)} is missing"
        logger.warning(f"{checkpoint}: the weights are in other files than the run wrote, and are taken as they are.")
        expected_files = {name: entry for name, entry in expected_files.items() if name not in missing}
    for name, (path, size, _) in expected_files.items():
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for name, (path, _, digest) in expected_files.items():
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} does not match its SHA-256"
    return None


def _weights_are_in_other_files(checkpoint: Path, missing: set[str], in_manifest: set[str]) -> bool:
    """
    Whether somebody has put a model's weights into other shards after its checkpoint was written, which does not damage them: what
    is missing are weights, and there are whole ones that the manifest does not know.
    """
    if any(Path(name).suffix != ".safetensors" and name != SAFE_WEIGHTS_INDEX_NAME for name in missing):
        return False
    index, other_files = checkpoint / SAFE_WEIGHTS_INDEX_NAME, [checkpoint / SAFE_WEIGHTS_NAME]
    if not other_files[0].is_file() and index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
            return False
        other_files = [index, *(checkpoint / name for name in set(shards))]
    return all(
        path.is_file() and path.name not in in_manifest and _damage_by_format(path) is None for path in other_files
    )


def _damage_by_format(path: Path) -> str | None:
    """What the formats say that end with a directory of their content, or begin with its size."""
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        try:
            safe_open(path, "pt")
        except SafetensorError as error:
            return f"{path.name} is damaged ({error})"
    elif path.suffix in (".pt", ".pth", ".bin"):
        with open(path, "rb") as file:
            # What PyTorch writes is a zip file; older formats cannot be told to be whole.
            begin = file.read(4)
        if not begin or (begin == b"PK\x03\x04" and not zipfile.is_zipfile(path)):
            return f"{path.name} is truncated"
    return None


def _damage_of_state(state: Path) -> str | None:
    if not state.is_file():
        return f"{state.name} is missing, so the checkpoint is incomplete"
    try:
        json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return f"{state.name} is truncated, so the checkpoint is incomplete"
    return None
