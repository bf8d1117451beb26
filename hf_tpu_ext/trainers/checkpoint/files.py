"""Checkpoints on disk: written beside their place and moved there whole, checked before they are resumed from."""

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from ...atomic_write import remove_temporary, sync_directory, write_atomically
from ...backends.processes import HostsDisagree, Processes
from ...errors import UserError
from ...report.record import RECORD_NAME, RUN_FILES, is_record


logger = logging.get_logger(__name__)

MANIFEST_NAME = "manifest.json"
_RUN_STATE_FILE = "run_state.json"
# Upstream takes directories `checkpoint-*` for checkpoints, and leaves `_*` out when it pushes the directory of a run.
_TEMPORARY = "_tmp-"
# Directories of what a run does not go on from, numbered.
_ASIDE = "_earlier"


def checkpoints_by_step(run_dir: str | Path) -> dict[int, Path]:
    """List the checkpoint directories of a run by the number in their name, ascending."""
    found = {int(path.name.rpartition("-")[2]): path for path in _named_as_checkpoints(run_dir) if path.is_dir()}
    return dict(sorted(found.items()))


def newest_checkpoint(run_dir: str | Path) -> str | None:
    """The checkpoint directory of a run with the highest number, or `None`."""
    return next((str(path) for path in reversed(checkpoints_by_step(run_dir).values())), None)


def _named_as_checkpoints(run_dir: str | Path) -> list[Path]:
    paths = Path(run_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return [path for path in paths if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]


def temporary_dir(checkpoint: Path) -> Path:
    """Name the directory beside a checkpoint's place that it is written in."""
    return checkpoint.with_name(_TEMPORARY + checkpoint.name)


def remove_leftovers(run_dir: str | Path) -> None:
    """Remove what a process left when it was killed while it wrote or deleted a checkpoint."""
    for path in Path(run_dir).glob(f"{_TEMPORARY}{PREFIX_CHECKPOINT_DIR}-*"):
        if re.fullmatch(rf"{_TEMPORARY}{PREFIX_CHECKPOINT_DIR}-\d+", path.name) and path.is_dir():
            remove_temporary(path, path.with_name(path.name.removeprefix(_TEMPORARY)))


def set_aside(run_dir: str | Path, resumed: str | None, writes_record: bool = True) -> None:
    """
    Move what a run does not go on from out of its way, with a line that says so: all checkpoints that are in its
    directory if it begins anew, those after the one that it resumes, and what has the name of a checkpoint that it may
    write.

    What is left in the directory is of this run, so its newest checkpoint is the one with the highest number, for
    upstream's code too, and none of another run is ever replaced or deleted. With the checkpoints of a run goes its
    record. The record of a run that left no checkpoint is replaced by a run that begins anew. Files by the names of a
    record that no run has written are moved, if this run `writes_record`.
    """
    run_dir = Path(run_dir)
    # Whatever has such a name would be replaced: a file or a broken link, too.
    found = {int(path.name.rpartition("-")[2]): path for path in _named_as_checkpoints(run_dir)}
    last = -1
    if resumed is not None:
        # Through links: a checkpoint may be on another disk.
        last = next((step for step, path in found.items() if path.exists() and path.samefile(resumed)), -1)
    others = [path for step, path in sorted(found.items()) if step > last]
    names = [path.name for path in others]
    record = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    is_foreign = last < 0 and (bool(others) or resumed is not None)
    moved_record = record if is_foreign or (writes_record and not is_record(run_dir / RECORD_NAME)) else []
    if not others and not moved_record:
        return
    aside = next_aside(run_dir)
    listed = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
    begins = "begins anew" if resumed is None else f"goes on from {resumed}"
    if not others:
        what = f"{run_dir} holds {', '.join(path.name for path in moved_record)}, not of this run, which {begins}"
    elif last < 0:
        what = f"{run_dir} holds checkpoints of another run ({listed}), and this one {begins}"
    else:
        what = f"This run goes on from {resumed}, before {listed}"
    go_on = ""
    if others:
        go_on = f" To go on with one of them, stop this run and set resume_from_checkpoint={str(aside / names[-1])!r}."
    logger.warning(f"{what}. They are moved to {aside}, where nothing deletes them.{go_on}")
    aside.mkdir()
    for path in [*others, *moved_record]:
        os.rename(path, aside / path.name)
    sync_directory(run_dir)


def next_aside(run_dir: Path) -> Path:
    """A directory that is not there yet, for what is moved out of a run's way."""
    number = 1
    while os.path.lexists(aside := run_dir / f"{_ASIDE}-{number}"):
        number += 1
    return aside


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


def find_damage(checkpoint: Path) -> str | None:
    """
    Say which file of a checkpoint is damaged, and how; `None` for a whole one. Each file is read once.

    One without a manifest (of stock TRL, or of transformers) is taken for whole if its state, which is written last,
    can be read, and no file was cut short.
    """
    try:
        if (checkpoint / MANIFEST_NAME).is_file():
            damage = _damage_by_manifest(checkpoint)
        else:
            damage = next(filter(None, map(_damage_by_format, sorted(checkpoint.glob("*")))), None)
        return damage or _damage_of_state(checkpoint / TRAINER_STATE_NAME)
    except OSError as error:
        name = Path(error.filename).name if error.filename else checkpoint.name
        return f"{name} cannot be read ({error.strerror})"


def _damage_by_manifest(checkpoint: Path) -> str | None:
    manifest = checkpoint / MANIFEST_NAME
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (checkpoint / name, entry["size"], entry["sha256"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_NAME} is damaged"
    missing = {name for name, (path, _, _) in expected.items() if not path.is_file()}
    if missing:
        if not _weights_are_in_other_files(checkpoint, missing, set(expected)):
            return f"{min(missing)} is missing"
        logger.warning(f"{checkpoint}: the weights are in other files than the run wrote, and are taken as they are.")
        expected = {name: entry for name, entry in expected.items() if name not in missing}
    for name, (path, size, _) in expected.items():
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for name, (path, _, digest) in expected.items():
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} does not match its SHA-256"
    return None


def _weights_are_in_other_files(checkpoint: Path, missing: set[str], known: set[str]) -> bool:
    """
    Whether somebody has put a model's weights into other shards after its checkpoint was written, which does not damage them: what
    is missing are weights, and there are whole ones that the manifest does not know.
    """
    if any(Path(name).suffix != ".safetensors" and name != SAFE_WEIGHTS_INDEX_NAME for name in missing):
        return False
    index, added = checkpoint / SAFE_WEIGHTS_INDEX_NAME, [checkpoint / SAFE_WEIGHTS_NAME]
    if not added[0].is_file() and index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
            return False
        added = [index, *(checkpoint / name for name in set(shards))]
    return all(path.is_file() and path.name not in known and _damage_by_format(path) is None for path in added)


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


def delete_old(run_dir: str | Path, newest: Path, limit: int | None, best: str | None) -> None:
    """
    Delete the oldest checkpoints, down to `limit` (`save_total_limit`), except the newest, which was just written, and
    the best.

    Upstream goes by the time of their last change. Here the number in their name counts, whatever the clock does. One that
    is higher than the newest's is not of this run ([`set_aside`]): it is left alone.
    """
    if not limit or limit < 0:
        return
    own = _own(run_dir, newest)
    kept = {newest} if best is None else {newest, Path(best)}
    surplus = len(own) - max(limit, len(kept))
    _delete([path for path in own if path not in kept][: max(0, surplus)])


def delete_all_but(run_dir: str | Path, newest: Path, best: str) -> None:
    """Delete the checkpoints of a run that has ended, the newest too, except the best."""
    own = _own(run_dir, newest)
    if Path(best) in own:
        _delete([path for path in own if path != Path(best)])


def _own(run_dir: str | Path, newest: Path) -> list[Path]:
    """Checkpoints of the run that wrote the newest. One that was put elsewhere, with a link in its place, is the user's."""
    newest_step = int(newest.name.rpartition("-")[2])
    return [
        path for step, path in checkpoints_by_step(run_dir).items() if step <= newest_step and not path.is_symlink()
    ]


def _delete(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        # Renamed first: half a checkpoint never has the name of one.
        os.rename(path, temporary_dir(path))
        shutil.rmtree(temporary_dir(path))


def write_run_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write, as JSON, what upstream's checkpoint leaves out. The file is whole or not there."""
    write_atomically(Path(checkpoint) / _RUN_STATE_FILE, json.dumps(state))


def read_run_state(checkpoint: str) -> dict[str, Any]:
    """Read what [`write_run_state`] wrote; of a checkpoint of upstream's trainer, nothing."""
    path = Path(checkpoint) / _RUN_STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def find_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """
    Resolve `resume_from_checkpoint`: a checkpoint directory, `True` for the newest complete one in `output_dir`, or
    `None` to start over. One that is not there or damaged is a `ValueError`.
    """
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is not True:
        checkpoint = Path(resume_from_checkpoint)
        damage = find_damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        inside = checkpoints_by_step(checkpoint).values()
        if inside:
            hint = f"It holds {', '.join(path.name for path in inside)}: give one of these"
        else:
            hint = "Give a checkpoint-N directory"
        what = damage if checkpoint.is_dir() else "it is not a directory"
        kind = "damaged" if (checkpoint / MANIFEST_NAME).exists() else "not a checkpoint"
        raise UserError(
            f"Can't find a valid checkpoint at {resume_from_checkpoint}, which is {kind}: {what}. {hint}, or "
            f"resume_from_checkpoint=True for the newest complete one in {output_dir!r}.{_to_accept(checkpoint)}"
        )
    for checkpoint in reversed(checkpoints_by_step(output_dir).values()):
        damage = find_damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        logger.warning(f"{checkpoint} is skipped: {damage}.{_to_accept(checkpoint)}")
    earlier = sorted(
        (path for path in Path(output_dir).glob(f"{_ASIDE}-*/{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()),
        key=lambda path: path.stat().st_mtime,
    )
    of_others = f"Of other runs there is {earlier[-1]}, which can be named instead of True. " if earlier else ""
    raise UserError(
        f"No valid checkpoint found in output directory ({output_dir}), and resume_from_checkpoint=True. {of_others}Leave "
        "resume_from_checkpoint out to start over, or set output_dir to the directory of the run to resume."
    )


def _to_accept(checkpoint: Path) -> str:
    manifest = checkpoint / MANIFEST_NAME
    if not manifest.is_file():
        return ""
    return (
        f" If it was changed on purpose, accept it as it is by removing its manifest: rm {shlex.quote(str(manifest))}"
    )


def find_for_all(resume_from_checkpoint: str | bool | None, output_dir: str, processes: Processes) -> str | None:
    """As [`find_checkpoint`], by the first of several processes: what it raises, all raise."""
    find = partial(find_checkpoint, resume_from_checkpoint, output_dir)
    return processes.by_first("the search for a checkpoint", find)


def check_all_see(checkpoint: str, processes: Processes, each_writes: bool = False) -> None:
    """
    Refuse (`ValueError` on all) a checkpoint that other hosts do not see as the first does, whole and the same. Of one that
    `each_writes` for itself (`save_on_each_node`), files of a process's own are other ones.
    """
    if processes.hosts == 1:
        return
    seen = _seen(checkpoint)
    if each_writes and seen is not None:
        # What is compared with the others' is whether it is whole.
        damage = find_damage(Path(checkpoint))
        seen = {} if damage is None else {f"checkpoint: {damage}": 0}
    of_first, *others = processes.exchange("a look at the checkpoint", seen)
    differing = [
        f"{processes.word} {index} {_difference(of_first, other)}"
        for index, other in enumerate(others, 1)
        if other != of_first
    ]
    if differing:
        raise HostsDisagree(
            f"{checkpoint} is not the same on all hosts: {', '.join(differing)}. Put output_dir on storage that all hosts see, "
            f"or copy the checkpoint to the same place on each: gcloud compute tpus tpu-vm scp --recurse {checkpoint} "
            f"SLICE:{checkpoint} --worker=all."
        )


def check_shared(output_dir: str, processes: Processes) -> None:
    """Refuse (`ValueError` on all) to load the best checkpoint at the end from a directory that not all hosts see."""
    if processes.hosts == 1:
        return
    with tempfile.TemporaryDirectory(dir=output_dir if processes.index == 0 else None) as probe:
        name = processes.of_first("a look for output_dir", str(Path(probe).absolute()))
        blind = [index for index, sees in enumerate(processes.exchange("the look", os.path.isdir(name))) if not sees]
    if blind:
        word, each = processes.word, "set save_on_each_node=True, " * processes.own_rows
        raise HostsDisagree(
            f"load_best_model_at_end=True needs an output_dir that all hosts see, and {word} {', '.join(map(str, blind))} does not "
            f"see {output_dir!r} of {word} 0. Put output_dir on storage that all hosts share, {each}or leave load_best_model_at_end "
            "out."
        )


def _seen(checkpoint: str) -> dict[str, Any] | None:
    """Sizes of a checkpoint's files, and the hash of its manifest."""
    if not Path(checkpoint).is_dir():
        return None
    manifest = Path(checkpoint) / MANIFEST_NAME
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(Path(checkpoint).rglob("*"))
        if path.is_file()
    }
    return {**sizes, "manifest": hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else ""}


def _difference(of_first: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None:
        return "does not see it"
    name = next(name for name in [*of_first, *other] if of_first.get(name, "") != other.get(name, ""))
    return f"has another {name}"


@contextmanager
def leaving_no_empty_dir(output_dir: str) -> Iterator[None]:
    """
    Context that makes sure (`ValueError`) that the output directory can be written to, before hours are spent on what
    goes there. It is created if need be.

    Where the context ends with an error, as of a setting that does not work, the directories that were made for it are
    removed again, if nothing is in them.
    """
    path = Path(output_dir)
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        _check_output_dir(output_dir)
        yield
    except BaseException:
        # The deepest is the first.
        with suppress(OSError):
            for directory in made:
                directory.rmdir()
        raise


def _check_output_dir(output_dir: str) -> None:
    try:
        os.makedirs(output_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise UserError(
            f"output_dir={output_dir!r} cannot be written to ({error.strerror}). Set output_dir to a directory that you "
            "may write to."
        ) from error
