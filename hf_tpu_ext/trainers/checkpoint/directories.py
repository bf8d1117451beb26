"""The checkpoint directories of a run: their names, what is moved out of a run's way, which are deleted."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ...atomic_write import remove_temporary, sync_directory
from ...errors import UserError
from ...report.record import RECORD_NAME, RUN_FILES, is_record


logger = logging.get_logger(__name__)

#: What an export says about itself, and what tells a directory as one.
EXPORT_FILE = "export.json"
# Upstream takes directories `checkpoint-*` for checkpoints, and leaves `_*` out when it pushes the directory of a run.
_TEMPORARY = "_tmp-"
# Directories of what a run does not go on from, numbered.
_ASIDE = "_earlier"


def checkpoints_by_step(run_dir: str | Path) -> dict[int, Path]:
    """List the checkpoint directories of a run by the number in their name, ascending."""
    return {step: path for step, path in _named_as_checkpoints(run_dir).items() if path.is_dir()}


def newest_checkpoint(run_dir: str | Path) -> str | None:
    """The checkpoint directory of a run with the highest number, or `None`."""
    return next((str(path) for path in reversed(checkpoints_by_step(run_dir).values())), None)


def _named_as_checkpoints(run_dir: str | Path, before: str = "") -> dict[int, Path]:
    """What has the name of a checkpoint, behind some letters perhaps, by its number, ascending."""
    name = before + PREFIX_CHECKPOINT_DIR
    paths = [path for path in Path(run_dir).glob(f"{name}-*") if re.fullmatch(rf"{name}-\d+", path.name)]
    return dict(sorted((int(path.name.rpartition("-")[2]), path) for path in paths))


def _exports(run_dir: Path) -> list[Path]:
    """The directories in that of a run that `hf-tpu export` has made of it, or of one of its checkpoints."""
    exports = []
    for file in sorted(run_dir.glob(f"*/{EXPORT_FILE}")):
        try:
            source = Path(json.loads(file.read_text(encoding="utf-8"))["run_dir"]).resolve()
        except (OSError, ValueError, TypeError, KeyError):
            # Somebody's own file.
            continue
        if run_dir.resolve() in (source, source.parent):
            exports.append(file.parent)
    return exports


def temporary_dir(checkpoint: Path) -> Path:
    """Name the directory beside a checkpoint's place that it is written in."""
    return checkpoint.with_name(_TEMPORARY + checkpoint.name)


def remove_leftovers(run_dir: str | Path) -> None:
    """Remove what a process left when it was killed while it wrote or deleted a checkpoint."""
    for path in _named_as_checkpoints(run_dir, _TEMPORARY).values():
        if path.is_dir():
            remove_temporary(path, path.with_name(path.name.removeprefix(_TEMPORARY)))


def set_aside(
    run_dir: str | Path,
    resumed_from: str | None,
    writes_record: bool = True,
    took_newest: bool = False,
    models_of_run: Iterable[str] = (),
) -> None:
    """
    Move what a run does not go on from out of its way, with a line that says so: all checkpoints that are in its
    directory if it begins anew, those after the one that it resumes, and what has the name of a checkpoint that it may
    write.

    What is left in the directory is of this run, so its newest checkpoint is the one with the highest number, for
    upstream's code too, and none of another run is ever replaced or deleted. With the checkpoints of a run go its
    record and what was exported of it, which would be taken for the new model, but for what is among the `models_of_run` by its path. The
    record of a run that left neither is replaced by a run that begins anew. Files by the names of a
    record that no run has written are moved, if this run `writes_record`. If it `took_newest`, which is the newest checkpoint that is
    whole, later ones are damaged, and no run can go on with them.
    """
    run_dir = Path(run_dir)
    # Whatever has such a name would be replaced: a file or a broken link, too.
    directories = _named_as_checkpoints(run_dir)
    last = -1
    if resumed_from is not None:
        # Links are followed: a checkpoint may be on another disk.
        last = next((step for step, path in directories.items() if path.exists() and path.samefile(resumed_from)), -1)
    others = [path for step, path in directories.items() if step > last]
    names = [path.name for path in others]
    record = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    stay = {Path(name).resolve() for name in models_of_run}
    exports = [path for path in _exports(run_dir) if last < 0 and path.resolve() not in stay]
    is_foreign = last < 0 and (bool(others or exports) or resumed_from is not None)
    moved_record = record if is_foreign or (writes_record and not is_record(run_dir / RECORD_NAME)) else []
    if not others and not exports and not moved_record:
        return
    aside = move_aside(run_dir, [*others, *exports, *moved_record])
    text = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
    begins = "begins anew" if resumed_from is None else f"goes on from {resumed_from}"
    held = [f"checkpoints of another run ({text})"] if others else []
    if exports:
        held.append(f"exports of another run ({', '.join(path.name for path in exports)})")
    if not held:
        what = f"{run_dir} holds {', '.join(path.name for path in moved_record)}, not of this run, which {begins}"
    elif last < 0:
        what = f"{run_dir} holds {' and '.join(held)}, and this one {begins}"
    else:
        what = f"This run goes on from {resumed_from}, before {text}"
    go_on = ""
    if others and not took_newest:
        go_on = f" To go on with one of them, stop this run and set resume_from_checkpoint={str(aside / names[-1])!r}."
    logger.warning(f"{what}. They are moved to {aside}, where nothing deletes them.{go_on}")


def checkpoints_aside(run_dir: str | Path) -> list[Path]:
    """Checkpoints that were moved out of a run's way."""
    return [path for path in Path(run_dir).glob(f"{_ASIDE}-*/{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]


def move_aside(directory: Path, paths: Iterable[Path]) -> Path:
    """Move what is in the way of a run, or of a model, to a directory that was not there yet, and return that."""
    number = 1
    while os.path.lexists(aside := directory / f"{_ASIDE}-{number}"):
        number += 1
    aside.mkdir()
    for path in paths:
        os.rename(path, aside / path.name)
    sync_directory(directory)
    return aside


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
    exempt = {newest} if best is None else {newest, Path(best)}
    surplus = len(own) - max(limit, len(exempt))
    _delete([path for path in own if path not in exempt][: max(0, surplus)])


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
        # It is renamed first: half a checkpoint never has the name of one.
        os.rename(path, temporary_dir(path))
        shutil.rmtree(temporary_dir(path))


@contextmanager
def leaving_no_empty_dir(output_dir: str) -> Iterator[None]:
    """
    Context that makes sure (`ValueError`) that the output directory can be written to, before hours are spent on what
    goes there. It is created if need be.

    Where the context ends with an error, as of a setting that does not work, the directories that were made for it are
    removed again, if nothing is in them.
    """
    path = Path(output_dir)
    new_directories = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        try:
            os.makedirs(output_dir, exist_ok=True)
            with tempfile.TemporaryFile(dir=output_dir):
                pass
        except OSError as error:
            raise UserError(
                f"output_dir={output_dir!r} cannot be written to ({error.strerror}). Set output_dir to a directory that you "
                "may write to."
            ) from error
        yield
    except BaseException:
        # The deepest is the first.
        with suppress(OSError):
            for directory in new_directories:
                directory.rmdir()
        raise
