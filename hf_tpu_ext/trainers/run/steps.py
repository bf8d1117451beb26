"""A trainer's side of its steps: the loss that upstream computes, and the stages that follow it."""

import math
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ...errors import UserError
from ...layers.attention import static_masks
from ...layers.chunked_head import LoopedLogProbs, head_computed_by
from ...step.optimizer import clip_gradients
from ...temporarily import temporarily
from ..checks.upstream import checkpointing_left_on
from .chips import rows_gathered
from .user_code import sees_micro_steps


class _Numbers(dict):
    """Numbers on the device, which a method of the trainer lists."""

    def __init__(self, numbers: dict[str, torch.Tensor], method: str):
        super().__init__(numbers)
        self._method = method

    def __missing__(self, name: str) -> NoReturn:
        raise UserError(
            f"numbers_of_loss() has no {name!r} here: {self._method} of your trainer does not return it. Let it return "
            f"{{**super().{self._method}(), {name!r}: torch.tensor(value)}}."
        )


class StepsMixin:
    """The part of [`TPUTrainerMixin`] that computes a step, or has what owns the steps run it."""

    # Whether the user overrides `training_step`: what that returns is what is logged.
    _override_returns_loss = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self._static_loss(inputs) if self.backend.static_shapes else nullcontext():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @contextmanager
    def _static_loss(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Within this context, upstream's code computes the loss of a batch in static shapes, and does not read the device."""
        segment_ids = inputs.pop("segment_ids", self.segment_ids)
        # In training, `forward_backward` has set what was sent.
        numbers = {} if self.model.training else self._numbers_of_evaluation()
        with (
            self.models_in_static_shapes(segment_ids),
            self.chips.gather_over_chips(self.accelerator),
            self.micro_steps_as_data(numbers),
            self.metrics_deferred(),
        ):
            yield

    @contextmanager
    def models_in_static_shapes(self, segment_ids: torch.Tensor | None = None) -> Iterator[None]:
        """Within this context, upstream's code runs models in static shapes; `segment_ids` as in [`static_masks`]."""
        with ExitStack() as stack:
            stack.enter_context(static_masks(segment_ids, sdpa=not self.backend.traces_steps))
            if self.backend.traces_steps:
                stack.enter_context(head_computed_by(partial(LoopedLogProbs.apply, self.backend)))
                stack.enter_context(self.chips.tokens_stay_on_chips())
            if self.compiles_steps:
                stack.enter_context(checkpointing_left_on(type(self)))
            yield

    def micro_steps_as_data(self, numbers: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
        """
        Within this context, upstream's `current_gradient_accumulation_steps` is a tensor that was sent: the last step of an epoch has fewer
        micro-steps.
        """
        if "micro_steps" not in numbers:
            return nullcontext()
        return temporarily(self, current_gradient_accumulation_steps=numbers["micro_steps"])

    @property
    def balances_experts(self) -> bool:
        """Whether upstream's loss has a part for the load of the experts."""
        return bool(vars(self).get("aux_loss_enabled"))

    def step_data(self) -> dict[str, torch.Tensor]:
        """Numbers on the host, besides the batch, that a step needs on the device."""
        # Upstream sets the number of micro-steps when a run begins.
        if self.args.gradient_accumulation_steps == 1 or "current_gradient_accumulation_steps" not in vars(self):
            return {}
        # Upstream takes all batches of a step before it computes the first: in the last step of an epoch, accelerate cuts what it
        # gathers to the rows of the last batch in each of them.
        state = self.accelerator.gradient_state
        cut = state.end_of_dataloader and state.remainder > 0
        return {
            "micro_steps": torch.tensor(float(self.current_gradient_accumulation_steps)),
            "rows_gathered": torch.tensor(float(state.remainder) if cut else math.inf),
        }

    def state_of_steps(self) -> list[torch.Tensor]:
        """Tensors that a training step reads and changes, besides those of the model and the optimizer, in the same order."""
        return [*self.loss_log.tensors.values(), *self.metric_tensors["train"].values()]

    def settings_of_programs(self) -> Hashable:
        """What programs depend on besides tensors, arguments and the optimizer: another value, another program."""
        return None

    def evaluation_data(self) -> dict[str, torch.Tensor]:
        """Numbers on the host, besides the batch, that a batch of an evaluation needs on the device."""
        # SFT divides the load-balancing loss by the micro-steps of the last training step.
        return self.step_data() if self.balances_experts else {}

    def _numbers_of_evaluation(self) -> dict[str, torch.Tensor]:
        return (
            self.backend.send(self.evaluation_data()) if self.evaluation_numbers is None else self.evaluation_numbers
        )

    def numbers_of_loss(self) -> dict[str, torch.Tensor]:
        """Where a loss is computed, on any device: what `step_data` lists, in an evaluation what `evaluation_data` does."""
        if not self.model.training:
            return _Numbers(self._numbers_of_evaluation(), "evaluation_data")
        has_sent = self.compiles_steps or (self.generates and self.backend.static_shapes)
        # There are none outside of a step, where a user may call `compute_loss`, too.
        numbers = self.steps.numbers if has_sent else {}
        return _Numbers(numbers or self.backend.send(self.step_data()), "step_data")

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        if not self.backend.static_shapes or "input_ids" not in inputs:
            return super().floating_point_ops(inputs)
        # Upstream counts the model's parameters anew at every micro-step.
        tokens = inputs["input_ids"].numel()
        if self._flos_per_token is None:
            self._flos_per_token = super().floating_point_ops(inputs) / tokens
        return self._flos_per_token * tokens

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        if not self.backend.static_shapes:
            if self.status is not None and not self.generates:
                self.status.count(inputs)
            return super().training_step(model, inputs, num_items_in_batch)
        if not self.is_in_train:
            # Called by a user: the loss and gradients of a batch, and no step of a run.
            loss = self._step_of_upstream(model, inputs, num_items_in_batch)
            self.backend.end_step()
            return loss
        # A schedule-free optimizer evaluates other weights than it trains, and upstream's `training_step` takes it back to the latter. That
        # is too late here: chips that compute gradients by themselves have been given the weights by then.
        self.optimizer.train()
        return self.steps.run(model, inputs, num_items_in_batch, self.step_data(), self.accelerator.sync_gradients)

    def forward_backward(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """The first stage of a micro-step: upstream's loss, which is returned, and its gradients."""
        if not self.compiles_steps:
            return self._step_of_upstream(model, inputs, num_items_in_batch)
        numbers = self.steps.numbers
        cuts_by_data = "rows_gathered" in numbers and self.steps.may_be_replayed
        cut = rows_gathered(self.accelerator, numbers["rows_gathered"]) if cuts_by_data else nullcontext()
        metrics = self.metric_tensors["train"]
        earlier_metrics = {**metrics}
        try:
            with self.micro_steps_as_data(numbers), cut:
                return self.chips.over_chips(self._step_of_upstream(model, inputs, num_items_in_batch))
        except RuntimeError:
            # It may be run again, see [`ReadInRegion`], and counts once.
            metrics.update(earlier_metrics)
            raise

    def _step_of_upstream(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """What upstream computes in a micro-step."""
        if self.is_in_train:
            # Now: a callback may have set its numbers since the last step, and the schedule changes them before this one ends.
            self.note_optimizer()
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.forget_batch()

    def forget_batch(self) -> None:
        """Let go of what is on the device besides the batch: the step is over."""
        self.by_length.forget()
        self.segment_ids = None

    def _overridden_step(self, *args, **kwargs) -> torch.Tensor:
        """The user's `training_step`: what it returns to upstream's loop is what is logged."""
        loss = type(self).training_step(self, *args, **kwargs)
        if self.is_in_train:
            self._log_loss(loss, self.accelerator.sync_gradients)
        return loss

    def log_step_loss(self, loss: torch.Tensor, sync_gradients: bool) -> None:
        """A stage of a step: adds its loss to the sums of the log, unless an override of `training_step` returns what is logged."""
        if not self._override_returns_loss:
            self._log_loss(loss, sync_gradients)

    def _log_loss(self, loss: torch.Tensor, sync_gradients: bool) -> None:
        (loss,) = self.backend.processes.mean([loss])
        self.loss_log.add(loss, sync_gradients)

    @property
    def plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that accelerate has wrapped."""
        return self.optimizer.optimizer

    def clip_as_upstream(self, model: nn.Module) -> torch.Tensor:
        """A stage of a step: clips the gradients as upstream's loop does. Returns their norm before."""
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm else None
        return self._get_grad_norm(model, norm)

    def _clip_grad_norm(self, model):
        if self.backend.static_shapes and self.steps.grad_norm is not None:
            # The program of the step has clipped them.
            return self.steps.grad_norm
        if self.compiles_steps and not self.steps.by_operators:
            return clip_gradients(model, self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model, grad_norm=None):
        if self.backend.static_shapes and self.steps.grad_norm is not None:
            return self.steps.grad_norm
        if grad_norm is None and self.compiles_steps and not self.steps.by_operators:
            return clip_gradients(model, None)
        return super()._get_grad_norm(model, grad_norm)

    def other_models(self) -> list[nn.Module]:
        """Models besides the trained one that a step runs, as the reference of a preference trainer."""
        module_ids = {id(module) for module in self.model.modules()}
        models = [
            value for value in vars(self).values() if isinstance(value, nn.Module) and id(value) not in module_ids
        ]
        return list(dict.fromkeys(models))

    @property
    def _runs_other_passes(self) -> bool:
        """Whether a step runs more than the trained model forward and backward."""
        return bool(self.other_models())

    def _loss_sums_tokens(self, model: nn.Module) -> bool:
        """Whether a batch's loss is the sum of its tokens' losses over `num_items_in_batch`."""
        return (
            self.model_accepts_loss_kwargs
            and self.compute_loss_func is None
            and self.label_smoother is None
            and isinstance(model, PreTrainedModel)
            and model.loss_type == "ForCausalLM"
        )

    @property
    def loss_grows_with_micro_steps(self) -> bool:
        """
        Whether a step of more micro-steps may have a greater loss: upstream leaves the division to a model whose `forward` takes
        `num_items_in_batch`, which some losses, such as those of BERT's classifiers, do not use.
        """
        is_of_trl = self._owner_of_loss.__module__.startswith("trl.")
        divides = is_of_trl or not self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return not divides and not self._loss_sums_tokens(unwrap_peft_model(self.model))

    def why_not_local(self, model: nn.Module) -> str | None:
        """Why chips that compute the gradients of their rows by themselves would not give the same step, as a clause."""
        base = unwrap_peft_model(model)
        if not self._loss_sums_tokens(base):
            return "the loss is not a sum over tokens"
        if vars(base.config.get_text_config()).get("output_router_logits"):
            return "the load-balancing loss of the experts depends on the global batch"
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
            # As PEFT's OSF and CPT have.
            return "a hook of a parameter is given the gradient of the global batch"
        if isinstance(model, PeftModel) and any(config.peft_type == "LILY" for config in model.peft_config.values()):
            return "the experts of Lily are weighted by a mean over the global batch"
        if (own_code := self.own_code_in_step("train")) is not None:
            return f"{own_code}, which may depend on the global batch"
        if (reason := self.why_not_padded("train")) is not None:
            return reason
        if self.args.gradient_accumulation_steps > 1 and sees_micro_steps(self.callback_handler.callbacks):
            return "a callback has code in on_substep_end, which may look at gradients"
        return None
