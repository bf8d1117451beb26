"""Where a run that is resumed begins."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ...errors import UserError
from .files import read_run_state


logger = logging.get_logger(__name__)

# How PyTorch says that a weight of a file has another shape than the model's, for PEFT's adapters, too.
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)")


class Resumption(TrainerCallback):
    """
    Begins a run where the one that it resumes was left, and its first epoch with the host's random state of then.

    A sampler without a seed of its own (`train_sampling_strategy="group_by_length"`) draws the order of an epoch from it.
    A run that is resumed inside the epoch draws the same order.

    Args:
        trainer ([`TPUTrainerMixin`]):
            The trainer.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        #: The host's random state that the epoch began with.
        self.epoch_rng_state: str | None = None
        #: What the next epoch begins with.
        self.resumed: str | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self._trainer
        if trainer._resumed_from is None:
            return
        control.should_training_stop = state.global_step >= state.max_steps
        # An epoch that begins now draws its order from it. One that goes on has drawn its order.
        trainer._load_rng_state(trainer._resumed_from)
        if state.epoch % 1:
            self.resumed = read_run_state(trainer._resumed_from).get("epoch_rng_state")
        if trainer._evaluation_due:
            trainer._make_up_for_evaluation()

    def on_epoch_begin(self, args, state, control, **kwargs):
        if self.resumed is not None:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(self.resumed), dtype=torch.uint8))
            self.resumed = None
        self.epoch_rng_state = torch.get_rng_state().numpy().tobytes().hex()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps for the run that resumes it."""
        dataset = self._trainer.train_dataset
        rows = {"train_rows": len(dataset)} if has_length(dataset) else {}
        return {"epoch_rng_state": self.epoch_rng_state, **rows}

    def compare_rows(self, checkpoint: str, state: dict[str, Any]) -> None:
        """Say that `train_dataset` has another number of rows than when a checkpoint, which keeps `state`, was written."""
        dataset, before = self._trainer.train_dataset, state.get("train_rows")
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
