"""Where one step ends and the next begins."""

from functools import partial

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import unwrap_peft_model

from ..step.activation_checkpointing import rematerialize
from ..step.optimizer import LazyAdamW, create_gradients
from ..step.replay import CLOSING, MICRO


class StepBoundary(TrainerCallback):
    """
    Ends the program of each micro-step and of each optimizer step, and makes the first step like every later one.

    Args:
        trainer ([`TPUTrainerMixin`]):
            The trainer that the callback belongs to.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._rematerialized: list[nn.Module] = []
        self._requires_grads = False

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        trainer = self._trainer
        with trainer.layers_in_place():
            self._rematerialized = rematerialize(model, trainer.compiled.rematerialization, trainer.backend)
        self._requires_grads = trainer.compiled.rematerialization != "none"
        with trainer.layers_as_a_loop():
            self._begin_run(args, model, optimizer)

    def _begin_run(self, args, model, optimizer) -> None:
        trainer = self._trainer
        if isinstance(optimizer.optimizer, LazyAdamW):
            optimizer.optimizer.create_state()
        if not trainer.keep_gradients_local(model) and args.gradient_accumulation_steps > 1:
            # Micro-steps add to gradients that are there from the start and are zeroed in place, so that the first
            # micro-step is the same program as the others. Without accumulation gradients live inside the one program
            # and need no memory between steps.
            create_gradients(model)
            model.zero_grad = partial(type(model).zero_grad, model, set_to_none=False)
        trainer.shard_training_state(model, optimizer.optimizer)
        trainer.separate_copies(model)
        trainer.start_replay(model, optimizer.optimizer)
        trainer.begin_watch()
        trainer.reset_upstream_loss()
        trainer.backend.wait()

    def on_substep_end(self, args, state, control, **kwargs):
        if self._trainer.replay is None:
            self._trainer.end_program(MICRO, f"step {state.global_step + 1}")

    def on_step_end(self, args, state, control, **kwargs):
        if self._trainer.replay is None:
            self._trainer.end_program(CLOSING, f"step {state.global_step}")

    def on_train_end(self, args, state, control, **kwargs):
        self.end()

    def end(self) -> None:
        """Leave the model as it was before the run. Callbacks are not told of the end of one that fails."""
        vars(self._trainer.model).pop("zero_grad", None)
        for module in self._rematerialized:
            del module.forward
        self._rematerialized = []
        if self._requires_grads:
            unwrap_peft_model(self._trainer.model).disable_input_require_grads()
            self._requires_grads = False
        self._trainer.local_gradients = None
