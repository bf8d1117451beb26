"""Stopping a run when it is told to."""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tqdm.auto import tqdm
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from ...callbacks.preemption import EvaluationCut, TrainingPreempted
from ...callbacks.samples import ShowSamples
from ...temporarily import temporarily
from .directories import delete_all_but


class StoppingMixin:
    """
    The part of [`TPUTrainerMixin`] that ends a run which is told to stop: at the end of its step it saves, and raises
    [`TrainingPreempted`]. It comes after the parts that save and resume in the order of bases, so that its `super()._save_rng_state`
    is upstream's, and writes no state of the run.
    """

    #: Whether `train` saves and stops when it is told to by a signal.
    stops_when_told = True

    def stopping_when_told(self) -> AbstractContextManager:
        """Context in which a signal stops the run."""
        if not self.stops_when_told:
            return nullcontext()
        if (upstreams := self.pop_callback(JITCheckpointCallback)) is not None:
            # It puts back the handler of signals that it has replaced, which a second signal is for. If it stayed, it would
            # run between the backward pass and the update of each step.
            upstreams.on_train_end(self.args, self.state, self.control)
        return self.preemption.listen()

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        if self.preemption.reason is not None:
            self._evaluation_due |= self.control.should_evaluate
            self.control.should_evaluate = False
        if self.preemption.listening and self.control.should_evaluate:
            with tempfile.TemporaryDirectory() as before:
                super()._save_rng_state(before)
                try:
                    with self.preemption.cutting_evaluation():
                        super()._maybe_log_save_evaluate(*args, **kwargs)
                except EvaluationCut:
                    # As if it had not begun: the resumed run draws the same numbers for it, and after it.
                    super()._load_rng_state(before)
                    self.drop_metrics("eval")
                    self.model.train()
                    self._evaluation_due, self.control.should_evaluate = True, False
        else:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.preemption.reason is not None:
            self.control.should_training_stop = True

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.preemption.reason is None:
            if self.preemption.listening:
                self.preemption.stop_listening()
            if self._made_up_at == self.state.global_step:
                # The run had ended but for this.
                self._save_checkpoint(self.model, trial)
            # Upstream takes every directory `checkpoint-3...` for a checkpoint of the run, a user's own too.
            with temporarily(self.args, save_total_limit=None):
                output = super()._finalize_training(trial, num_train_samples, start_time)
            best, checkpoint = self.state.best_model_checkpoint, Path(self._checkpoint(trial))
            if self.args.should_save and best is not None and self.args.save_total_limit == 1:
                delete_all_but(checkpoint.parent, checkpoint, best)
            return output
        if self._last_save != (self.state.global_step, self._evaluation_due):
            # Resuming takes the optimizer.
            with temporarily(self.args, save_only_model=False):
                self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        # Answering takes longer than there may be time.
        samples = self.pop_callback(ShowSamples)
        # Nor is this the end, where the best weights are loaded and other checkpoints are deleted.
        with temporarily(self.args, load_best_model_at_end=False, save_total_limit=None):
            super()._finalize_training(trial, num_train_samples, start_time)
        if samples is not None:
            self.add_callback(samples)
        raise self._preemption_error(self._checkpoint(trial))

    def _preemption_error(self, checkpoint: str) -> TrainingPreempted:
        # As soon as one process ends, its launcher ends the others, of which the first still writes.
        self.accelerator.wait_for_everyone()
        stop = TrainingPreempted(self.preemption.reason, checkpoint, self.state.global_step)
        if self.is_world_process_zero():
            tqdm.write(str(stop))
        return stop
