"""Where a run that is resumed begins."""

import torch
from transformers import TrainerCallback

from .checkpoints import read_run_state


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
