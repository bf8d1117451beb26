"""Replaying steps: when it is done, and how a trainer's step is put together for it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..backends.program import Program
from ..step.optimizer import LazyAdamW, clip_gradients
from ..step.python_state import PythonState
from ..step.replay import CLOSING, MICRO, StepReplay, say_refused
from .own_code import (
    attributes_of_a_step,
    draws_other_layers,
    find_own_code,
    hooks_of_all_modules,
    namespaces_of_a_step,
)


class SentBatch(dict):
    """A batch that is on the device."""


class ReplayMixin:
    """
    The part of [`TPUTrainerMixin`] that runs steps by the handle of their compiled program, see [`StepReplay`].

    A replayed step runs no Python of the model, the loss or the optimizer. What Python of known packages may have read is
    compared at each step. It is left off by itself where code of the user's runs inside a step; `step_replay=True` says that this
    code does the same at every step.
    """

    #: What replays the steps of the run under way, or `None`.
    replay: StepReplay | None = None

    def start_replay(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """
        Replay the steps of this run from now on, if that is wanted and possible.

        Args:
            model ([`~torch.nn.Module`]):
                Model on the device.
            optimizer ([`~torch.optim.Optimizer`]):
                Its optimizer, with its state.
        """
        wanted = self.compiled.step_replay
        if wanted is False:
            return
        models = [model, *self._further_models()]
        why_not = partial(self._why_not_replay, models, assume_pure=wanted is True)
        reason = why_not()
        if reason is not None:
            say_refused(reason)
            return
        zero_gradients = model.zero_grad
        # The gradients are zeroed within the step's program.
        model.zero_grad = _do_nothing
        self.replay = StepReplay(
            self.backend,
            models,
            state=self._step_tensors,
            zero_gradients=zero_gradients,
            note=partial(self._note_python_state, models),
            settings=self._step_settings,
            why_not=why_not,
            run_traced=self._run_traced,
            copies=self._copies,
            assume_pure=wanted is True,
        )
        optimizer.replay = self.replay

    def end_replay(self) -> None:
        """Leave the model and the optimizer as they were before [`~ReplayMixin.start_replay`]."""
        if self.replay is None:
            return
        self.replay = None
        vars(self.model).pop("zero_grad", None)
        if isinstance(self._plain_optimizer, LazyAdamW):
            self._plain_optimizer.replay = None

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def _why_not_replay(self, models: Sequence[nn.Module], assume_pure: bool) -> str | None:
        optimizer = self._plain_optimizer
        if not isinstance(optimizer, LazyAdamW):
            return (
                f"{type(optimizer).__name__} takes its learning rate as a Python number (optim=adamw_torch does not)"
            )
        if (setting := draws_other_layers(models[0])) is not None:
            return f"{setting} leaves out other layers at every step"
        if assume_pure or (found := find_own_code(self, models)) is None:
            return None
        return f"{found}; step_replay=True if it does the same at every step"

    def _note_python_state(self, models: Sequence[nn.Module], given: list[torch.Tensor]) -> PythonState:
        roots: dict[str, Any] = {}
        for model in models:
            unwrapped = unwrap_peft_model(model)
            if isinstance(unwrapped, PreTrainedModel):
                # Each module has it, too.
                roots.setdefault("model.config", unwrapped.config)
        roots |= {"model" if index == 0 else f"further model {index}": model for index, model in enumerate(models)}
        roots |= hooks_of_all_modules()
        optimizer = self._plain_optimizer
        attributes = {
            "trainer": (self, attributes_of_a_step(self)),
            "optimizer": (optimizer, ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")),
        }
        return PythonState(
            roots, attributes, namespaces_of_a_step(self, models), given, self.backend.programs.memory_of
        )

    # ---- What a step depends on ----

    def _further_models(self) -> list[nn.Module]:
        """Models besides the trained one that a step runs."""
        return []

    def _step_data(self) -> dict[str, torch.Tensor]:
        """Numbers on the host, besides the batch, that a step needs on the device."""
        return {}

    def _step_tensors(self) -> list[torch.Tensor]:
        """Tensors that a step reads and changes, besides the model's and its gradients; always in the same order."""
        tensors = [*self.loss_log.tensors.values()]
        for state in self._plain_optimizer.state.values():
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        if self.local_gradients is not None:
            tensors += self.local_gradients.tensors
        return tensors

    def _step_settings(self) -> Any:
        return (
            id(self._plain_optimizer),
            self._plain_optimizer.settings(),
            tuple(map(id, self.callback_handler.callbacks)),
        )

    # ---- A step ----

    def reset_upstream_loss(self) -> None:
        """Set the sum of losses that upstream keeps back to 0, where the losses are that are added to it."""
        zero = torch.zeros(())
        self._tr_loss = self.backend.send(zero) if self.replay is None else zero

    def _run_traced(self, kind: str, run: Callable[[], Program | None]) -> Program | None:
        return self.end_program(kind, f"step {self.state.global_step + 1}", run)

    def _replayed_step(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        closing = self.accelerator.sync_gradients
        self._follow_optimizer()
        if self.replay is None:
            return self._traced_step(model, inputs, num_items_in_batch)
        with self._copies_as_ever():
            self.replay.enter_training_mode()
            batch = self._send_batch(inputs)
        data = {
            **batch,
            **self.step_data,
            "num_items_in_batch": num_items_in_batch,
            # Fewer at the end of an epoch; upstream divides some losses by it.
            "accumulation": self.current_gradient_accumulation_steps,
        }
        if self.replay.begin(CLOSING if closing else MICRO, data):
            self._traced_step(model, SentBatch(batch), num_items_in_batch)
        if not closing:
            self.replay.end()
        # The loss is kept by the loss log; upstream adds what it gets here to a sum that is not used.
        return torch.zeros(())

    def _follow_optimizer(self) -> None:
        """Go on with an optimizer that a callback has put in the place of the run's own."""
        optimizer = self._plain_optimizer
        if not isinstance(optimizer, LazyAdamW):
            self.end_replay()
            self.reset_upstream_loss()
            say_refused(f"the optimizer was replaced by {type(optimizer).__name__}")
        elif optimizer.replay is not self.replay:
            optimizer.replay = self.replay
            optimizer.create_state()

    def _clip_grad_norm(self, model):
        if not self.backend.traces_steps:
            return super()._clip_grad_norm(model)
        if self.replay is not None and self.replay.replays:
            return self.replay.grad_norm
        return clip_gradients(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        if self.replay is None:
            return super()._get_grad_norm(model, grad_norm)
        if not self.replay.replays:
            self.replay.grad_norm.copy_(super()._get_grad_norm(model, grad_norm))
        return self.replay.grad_norm


def _do_nothing(set_to_none: bool = True) -> None:
    pass
