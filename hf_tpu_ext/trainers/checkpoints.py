"""Which checkpoint to resume from, and what it keeps besides upstream's files."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..atomic_write import write_atomically
from .checkpoint_files import MANIFEST_NAME, checkpoints_by_step, find_damage


logger = logging.get_logger(__name__)

_RUN_STATE_FILE = "run_state.json"


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
        raise ValueError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} is {kind}: {what}. {hint}, or "
            f"resume_from_checkpoint=True for the newest complete one in {output_dir!r}."
        )
    for checkpoint in reversed(checkpoints_by_step(output_dir).values()):
        damage = find_damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        logger.warning(f"{checkpoint} is skipped: {damage}.")
    raise ValueError(
        f"resume_from_checkpoint=True, but {output_dir!r} holds no complete checkpoint. Leave resume_from_checkpoint out to "
        "start over, or set output_dir to the directory of the run to resume."
    )


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
        raise ValueError(
            f"output_dir={output_dir!r} cannot be written to ({error.strerror}). Set output_dir to a directory that you "
            "may write to."
        ) from error
