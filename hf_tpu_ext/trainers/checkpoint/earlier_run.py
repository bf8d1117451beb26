"""What an earlier run has left in the directory of a run: it is moved out of the way, and nothing of it is lost."""

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ...report.record import COMPLETIONS, RECORD_NAME, RUN_FILES, is_record
from .directories import move_aside, named_as_checkpoints
from .saved_model import files_of_model
from .verification import find_damage


logger = logging.get_logger(__name__)

#: What an export says about itself, and what tells a directory as one.
EXPORT_FILE = "export.json"


def set_aside(
    run_dir: str | Path,
    resumed_from: str | None,
    writes_record: bool = True,
    took_newest: bool = False,
    models_of_run: Iterable[str] = (),
    max_steps: int = 0,
) -> Path | None:
    """
    Move what a run does not go on from out of its way, with a line that says so: if it begins anew, all that an earlier
    run has left, which is checkpoints, the model that it saved at its end, exports, its record, and the completions that TRL has
    logged; if it is resumed, what came after its checkpoint, and the model, where there are steps to go on with, up to `max_steps`.

    What is left in the directory is of this run, so its newest checkpoint is the one with the highest number, for
    upstream's code too, a model there is what it has trained, and nothing of another run is ever replaced or deleted. What
    is among the `models_of_run` by its path stays. Whatever has the name of a checkpoint that this run may write is
    moved, and files by the names of a record that no run has written, if it `writes_record`. If it `took_newest`, which is
    the newest checkpoint that is whole, later ones are damaged, and no run can go on with them. The directory that things
    were moved to is returned, if any were.
    """
    run_dir = Path(run_dir)
    # Whatever has such a name would be replaced: a file or a broken link, too.
    directories = named_as_checkpoints(run_dir)
    last = -1
    if resumed_from is not None:
        # Links are followed: a checkpoint may be on another disk.
        last = next((step for step, path in directories.items() if path.exists() and path.samefile(resumed_from)), -1)
    others = [path for step, path in directories.items() if step > last]
    names = [path.name for path in others]
    record = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
    stay = {Path(name).resolve() for name in models_of_run}
    exports = [path for path in _exports(run_dir) if last < 0 and path.resolve() not in stay]
    model = files_of_model(run_dir) if (last < max_steps or others) and run_dir.resolve() not in stay else []
    is_of_run = is_record(run_dir / RECORD_NAME)
    moved_record = record if (last < 0 if is_of_run else writes_record) else []
    if last < 0 and any(run_dir.glob(f"{COMPLETIONS}/*.parquet")):
        moved_record = [*moved_record, run_dir / COMPLETIONS]
    if not (others or exports or model or moved_record):
        return None
    aside = move_aside(run_dir, [*others, *exports, *model, *moved_record])
    if run_dir / COMPLETIONS in moved_record:
        # TRL has made the directory when the trainer was made.
        (run_dir / COMPLETIONS).mkdir()
    held = names if len(names) < 4 else [f"{names[0]} to {names[-1]}"]
    held = [
        *held,
        *(path.name for path in [*exports, *moved_record]),
        *(["the files of a saved model"] if model else []),
    ]
    begins = "begins anew" if resumed_from is None else f"goes on from {resumed_from}"
    go_on = ""
    if others and not took_newest:
        go_on = f" To go on with one of them, stop this run and set resume_from_checkpoint={str(aside / names[-1])!r}."
    logger.warning(
        f"{run_dir} holds {', '.join(held)} from before this run, which {begins}. They are moved to {aside}, where nothing deletes them.{go_on}"
    )
    return aside


def find_best(state: TrainerState, resumed_from: str, aside: Path | None) -> str | None:
    """
    Find the best checkpoint so far of a run that is resumed. Its `state` says where it was. From there it may have gone with
    the one that is `resumed_from`, out of the way of another run, or to where [`set_aside`] has just moved it, which is
    `aside`.
    """
    recorded = state.best_model_checkpoint
    if recorded is not None and Path(recorded).is_dir():
        return recorded
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    for path in (Path(resumed_from).with_name(name), *([] if aside is None else [aside / name])):
        if _is_before(path, state):
            logger.warning(f"The best checkpoint so far, of step {state.best_global_step}, is {path} now.")
            return str(path)
    if recorded is not None:
        logger.warning(
            f"The best checkpoint so far, of step {state.best_global_step}, was found neither in {recorded} nor beside "
            f"{resumed_from}, whole and of the same run: the run has no best checkpoint until a later evaluation is better."
        )
    return None


def _is_before(checkpoint: Path, state: TrainerState) -> bool:
    """Whether a checkpoint is whole and of the same run as a later state. Another run may have written one of that step."""
    if find_damage(checkpoint) is not None:
        return False
    history = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).log_history
    # In their text NaN is equal to NaN.
    return json.dumps(history) == json.dumps(state.log_history[: len(history)])


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
