"""The checkpoint that a run resumes from: found, verified, and the same for all processes."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ...backends.processes import HostsDisagree, Processes
from ...errors import UserError
from .directories import checkpoints_aside, checkpoints_by_step
from .verification import MANIFEST_NAME, find_damage, how_to_accept


logger = logging.get_logger(__name__)


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
        what = (
            damage if checkpoint.is_dir() else "it is not a directory" if checkpoint.exists() else "it does not exist"
        )
        kind = "damaged" if (checkpoint / MANIFEST_NAME).exists() else "not a checkpoint"
        raise UserError(
            f"Can't find a valid checkpoint at {resume_from_checkpoint}, which is {kind}: {what}. {hint}, or "
            f"resume_from_checkpoint=True for the newest complete one in {output_dir!r}.{how_to_accept(checkpoint)}"
        )
    for checkpoint in reversed(checkpoints_by_step(output_dir).values()):
        damage = find_damage(checkpoint)
        if damage is None:
            return str(checkpoint)
        logger.warning(f"{checkpoint} is skipped: {damage}.{how_to_accept(checkpoint)}")
    earlier = sorted(checkpoints_aside(output_dir), key=lambda path: path.stat().st_mtime)
    of_others = f"Of other runs there is {earlier[-1]}, which can be named instead of True. " if earlier else ""
    raise UserError(
        f"No valid checkpoint found in output directory ({output_dir}) for resume_from_checkpoint=True. {of_others}Leave "
        "resume_from_checkpoint out to start over, or set output_dir to the directory of the run to resume."
    )


def check_all_see(checkpoint: str, processes: Processes, each_writes: bool = False) -> None:
    """
    Refuse (`ValueError` on all) a checkpoint that other hosts do not see as the first does, whole and the same. Of one that
    `each_writes` for itself (`save_on_each_node`), files of a process's own are other ones.
    """
    if processes.hosts == 1:
        return
    listing = _list_files(checkpoint)
    if each_writes and listing is not None:
        # What is compared with the others' is whether it is whole.
        damage = find_damage(Path(checkpoint))
        listing = {} if damage is None else {f"checkpoint: {damage}": 0}
    of_first, *others = processes.exchange("a look at the checkpoint", listing)
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


def _list_files(checkpoint: str) -> dict[str, Any] | None:
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
