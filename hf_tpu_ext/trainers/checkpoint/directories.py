"""The checkpoint directories of a run: their names, and which are deleted."""

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


logger = logging.get_logger(__name__)

# Upstream takes directories `checkpoint-*` for checkpoints, and leaves `_*` out when it pushes the directory of a run.
_TEMPORARY = "_tmp-"
# Directories of what a run does not go on from, numbered.
_ASIDE = "_earlier"


def checkpoints_by_step(run_dir: str | Path) -> dict[int, Path]:
    """List the checkpoint directories of a run by the number in their name, ascending."""
    return {step: path for step, path in named_as_checkpoints(run_dir).items() if path.is_dir()}


def newest_checkpoint(run_dir: str | Path) -> str | None:
    """The checkpoint directory of a run with the highest number, or `None`."""
    return next((str(path) for path in reversed(checkpoints_by_step(run_dir).values())), None)


def named_as_checkpoints(run_dir: str | Path, before: str = "") -> dict[int, Path]:
    """What has the name of a checkpoint, behind some letters perhaps, by its number, ascending."""
    name = before + PREFIX_CHECKPOINT_DIR
    paths = [path for path in Path(run_dir).glob(f"{name}-*") if re.fullmatch(rf"{name}-\d+", path.name)]
    return dict(sorted((int(path.name.rpartition("-")[2]), path) for path in paths))


def temporary_dir(checkpoint: Path) -> Path:
    """Name the directory beside a checkpoint's place that it is written in."""
    return checkpoint.with_name(_TEMPORARY + checkpoint.name)


def remove_leftovers(run_dir: str | Path) -> None:
    """Remove what a process left when it was killed while it wrote or deleted a checkpoint."""
    for path in named_as_checkpoints(run_dir, _TEMPORARY).values():
        if path.is_dir():
            remove_temporary(path, path.with_name(path.name.removeprefix(_TEMPORARY)))


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
    is higher than the newest's is not of this run ([`~hf_tpu_ext.trainers.checkpoint.earlier_run.set_aside`]): it is left alone.
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
        try:
            shutil.rmtree(temporary_dir(path))
        except OSError as error:
            # A file that somebody has open on NFS, or an upload of it: no reason to end a run. The next one removes what is left.
            logger.warning(f"{path} could not be deleted ({error}), and is left as {temporary_dir(path)}.")


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
