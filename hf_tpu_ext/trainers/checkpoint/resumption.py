"""Where a run that is resumed begins."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ...errors import UserError


logger = logging.get_logger(__name__)

# How PyTorch says that a weight of a file has another shape than the model's, for PEFT's adapters, too.
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)")


class Resumption(TrainerCallback):
    """
    Begins the first epoch of a run that is resumed with the host's random state of then.

    A sampler without a seed of its own (`train_sampling_strategy="group_by_length"`) draws the order of an epoch from it.
    A run that is resumed inside the epoch draws the same order.

    Args:
        begin (`Callable[[TrainerControl], str | None]`):
            Called when a run begins. Returns that state, where the run goes on inside an epoch.
    """

    def __init__(self, begin: Callable[[TrainerControl], str | None]):
        self._begin = begin
        #: The host's random state that the epoch began with.
        self.epoch_rng_state: str | None = None
        # What the next epoch begins with.
        self._resumed: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._resumed = self._begin(control)

    def on_epoch_begin(self, args, state, control, **kwargs):
        if self._resumed is not None:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(self._resumed), dtype=torch.uint8))
            self._resumed = None
        self.epoch_rng_state = torch.get_rng_state().numpy().tobytes().hex()


def compare_rows(dataset: Any, checkpoint: str, before: int | None) -> None:
    """Say that `train_dataset` has another number of rows than when a checkpoint was written, where both are known."""
    if before is not None and has_length(dataset) and len(dataset) != before:
        logger.warning(
            f"train_dataset had {before} rows when {checkpoint} was written, and has {len(dataset)} now. The run goes on at the "
            "same step, in another order of the rows: some may be trained on twice in this epoch, and others not at all. To go "
            "on as before, pass the same rows; to train on all of the new ones, begin a new run from the weights, without "
            "resume_from_checkpoint."
        )


@contextmanager
def refusing_other_sizes(checkpoint: str) -> Iterator[None]:
    """Context in which weights of a checkpoint are loaded. A [`UserError`] says that they are of a model of other sizes."""
    try:
        yield
    except RuntimeError as error:
        found = _OTHER_SHAPE.search(str(error))
        if found is None:
            raise
        name, written, own = found.groups()
        raise UserError(
            f"{checkpoint} is of another model than this run trains: {name} has the shape {written} there and {own} here. Load the "
            "model of the run that wrote it, with the same adapter (lora_*), or leave resume_from_checkpoint out to begin a new "
            "run, best with another output_dir."
        ) from error
