"""The training steps of a run: where each one begins, is traced or replayed, and ends."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import unwrap_peft_model

from ..step.activation_checkpointing import rematerialize
from ..step.optimizer import LazyAdamW, StepGradients, clip_gradients
from ..step.python_state import PythonState
from ..step.replay import MICRO_STEP, OPTIMIZER_STEP, StepReplay, warn_not_replayed
from .own_code import (
    HOOKS_OF_ALL_MODULES,
    METHODS_OF_A_STEP,
    attributes_of_a_step,
    draws_other_layers,
    find_own_code,
    namespaces_of_a_step,
)


class SentBatch(dict):
    """A batch that is on the device."""


def dtypes_of(models: Sequence[nn.Module]) -> tuple[torch.dtype, ...]:
    """Dtypes of all parameters. Frozen weights are short while they are in use."""
    return tuple(parameter.dtype for model in models for parameter in model.parameters())


def note_python_state(
    trainer,
    models: Sequence[nn.Module],
    memory_of: Callable[[list[torch.Tensor]], Any],
    given: list[torch.Tensor],
    methods: tuple[str, ...] = METHODS_OF_A_STEP,
) -> PythonState:
    """
    Note what Python may read in `methods` of a trainer, besides the values of the tensors that are given. `memory_of` is as in
    [`PythonState`].
    """
    roots: dict[str, Any] = {}
    for model in models:
        unwrapped = unwrap_peft_model(model)
        if isinstance(unwrapped, PreTrainedModel):
            # Each module has it, too.
            roots.setdefault("model.config", unwrapped.config)
    roots |= {"model" if index == 0 else f"further model {index}": model for index, model in enumerate(models)}
    roots |= HOOKS_OF_ALL_MODULES
    attributes = {"trainer": (trainer, attributes_of_a_step(trainer, methods))}
    if methods is METHODS_OF_A_STEP:
        hooks = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        attributes["optimizer"] = trainer._plain_optimizer, hooks
    return PythonState(roots, attributes, namespaces_of_a_step(trainer, models), given, memory_of)


class TrainingSteps(TrainerCallback):
    """
    Owns the training steps of a trainer on XLA.

    Upstream's loop calls `training_step`, where a step begins: it is traced, or what was recorded of it is to be replayed,
    see [`StepReplay`]. After the optimizer upstream calls `on_step_end`, or `on_substep_end` with gradient accumulation,
    where the step ends: its program is run, and those who watch are told. This object is the first of the callbacks, so
    that all others find a step that has ended.

    A replayed step runs no Python of the model, the loss or the optimizer. What Python of known packages may have read is
    compared at each step. It is left off by itself where code of the user's runs inside a step; `step_replay=True` says
    that this code does the same at every step.

    Args:
        trainer ([`TPUTrainerMixin`]):
            The trainer.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        #: What replays the steps of the run under way, or `None`.
        self.replay: StepReplay | None = None
        #: Why the steps of the last run could not be replayed.
        self.why_not: str | None = None
        #: Numbers that the step under way has on the device, besides the batch.
        self.data: dict[str, torch.Tensor] = {}
        # The step that has begun and not ended.
        self._under_way: str | None = None
        self._gradients: StepGradients | None = None
        self._rematerialized: list[nn.Module] = []

    @property
    def replays(self) -> bool:
        """Whether the step under way, or the last one, is replayed."""
        return self.replay is not None and self.replay.replays

    # ---- A run ----

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        trainer = self._trainer
        # Not when `train` is called: auto_find_batch_size begins again with other shapes.
        trainer.expect_batches("train")
        if trainer.neftune_noise_alpha is not None:
            trainer.by_length.replace_noise(trainer.neftune_hook_handle)
        with trainer.layers.in_place():
            self._rematerialized = rematerialize(model, trainer.compiled.rematerialization, trainer.backend)
        with trainer.layers.as_a_loop():
            self._begin_run(model, optimizer.optimizer)

    def _begin_run(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trainer = self._trainer
        trainer.evaluations.forget()
        if isinstance(optimizer, LazyAdamW):
            optimizer.create_state()
        trainer.averaging.begin()
        self.keep_gradients()
        trainer.chips.shard_training_state(model, optimizer)
        trainer.copies.separate(model)
        self._start_replay(model)
        trainer.watching.begin()
        self.reset_upstream_loss()
        trainer.backend.wait()

    def keep_gradients(self) -> None:
        """Make the gradients of the model what they are between the steps of this run."""
        trainer = self._trainer
        if self._gradients is not None:
            self._gradients.close()
        local = trainer.chips.keep_gradients_local(trainer.model)
        accumulates = trainer.args.gradient_accumulation_steps > 1
        self._gradients = StepGradients(trainer.model, keep=accumulates and not local)
        # Not a method of this object: a copy of the model would come with one of the trainer.
        trainer.model.zero_grad = self._gradients.zero_grad

    def reset_upstream_loss(self) -> None:
        """Set the sum of losses that upstream keeps back to 0, where the losses are that are added to it."""
        zero = torch.zeros(())
        self._trainer._tr_loss = self._trainer.backend.send(zero) if self.replay is None else zero

    def on_train_end(self, args, state, control, **kwargs):
        self.end_run()

    def end_run(self) -> None:
        """Leave the model as it was before the run. Callbacks are not told of the end of one that fails."""
        trainer = self._trainer
        self._under_way = None
        self._stop_replay()
        trainer.evaluations.forget()
        vars(trainer.model).pop("zero_grad", None)
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
            if isinstance(self._optimizer, LazyAdamW):
                self._optimizer.left_out = ()
        for module in self._rematerialized:
            del module.forward
        self._rematerialized = []
        trainer.chips.local_gradients = None

    # ---- A step ----

    def run(self, model, inputs, num_items_in_batch, trace: Callable) -> torch.Tensor:
        """
        Begin a micro-step, and unless it is replayed, trace it: `trace` is called with the other arguments, which are
        those of upstream's `training_step`. Returned is what upstream adds to the loss that it would log. With replay
        that is 0: the loss is kept by [`LossLog`].
        """
        trainer, send = self._trainer, self._trainer.backend.send
        numbers = {**trainer._step_data(), "seed": trainer.seeds.next()}
        self._follow_optimizer()
        self._under_way = OPTIMIZER_STEP if self._updates else MICRO_STEP
        if self.replay is None:
            self.data, num_items_in_batch = send(numbers), send(num_items_in_batch)
            with trainer.copies.not_made():
                loss = trace(model, inputs, num_items_in_batch)
            self._leave_out_unused()
            return loss
        with trainer.copies.not_made():
            if not model.training:
                # Upstream does so at each step.
                model.train()
            beside = {
                **numbers,
                "num_items_in_batch": num_items_in_batch,
                # Fewer at the end of an epoch; upstream divides some losses by it.
                "accumulation": trainer.current_gradient_accumulation_steps,
            }
            # Names of their own: columns of a batch have any.
            named = {(self._under_way, name): value for name, value in beside.items()}
            tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
            data = named | trainer._send_batch(inputs, tensors)
        self.data = {name: data[self._under_way, name] for name in numbers}
        if self.replay.begin(self._under_way, data):
            batch = SentBatch((name, value) for name, value in data.items() if name not in named)
            trace(model, batch, data[self._under_way, "num_items_in_batch"])
            self._leave_out_unused()
        self._gradients.in_program = self.replay.replays
        self._optimizer.in_program = self.replay.updates if self.replay.replays else None
        return torch.zeros(())

    @property
    def _updates(self) -> bool:
        """Whether the micro-step under way is the one with the optimizer's update."""
        return self._trainer.accelerator.sync_gradients

    def _leave_out_unused(self) -> None:
        """Have the optimizer leave out what no micro-step has used, as it does where such parameters have no gradient."""
        if not self._updates:
            return
        if isinstance(self._optimizer, LazyAdamW):
            self._optimizer.left_out = self._gradients.unused
            return
        for parameter in self._gradients.unused:
            parameter.grad = None

    def on_substep_end(self, args, state, control, **kwargs):
        self.end()

    def on_step_end(self, args, state, control, **kwargs):
        self.end()

    def end(self) -> None:
        """End the step that is under way, if there is one: run its program, and tell those who watch."""
        kind, self._under_way = self._under_way, None
        if kind is None:
            return
        done = self._trainer.state.global_step
        where = f"step {done if kind == OPTIMIZER_STEP else done + 1}"
        run_traced = partial(self._trainer.end_program, kind, where)
        if self.replay is None:
            run_traced()
            return
        if kind == OPTIMIZER_STEP:
            self.replay.end(run_traced, self._optimizer.updated, self._optimizer.sent)
        else:
            self.replay.end(run_traced)
        self._gradients.in_program, self._optimizer.in_program = False, None

    # ---- The optimizer ----

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._trainer._plain_optimizer

    def _follow_optimizer(self) -> None:
        """Go on with an optimizer that a callback has put in the place of the run's own."""
        optimizer = self._optimizer
        self._trainer.averaging.follow_optimizer()
        if self.replay is None:
            return
        if not isinstance(optimizer, LazyAdamW):
            self._stop_replay()
            self.reset_upstream_loss()
            warn_not_replayed(f"the optimizer was replaced by {type(optimizer).__name__}")
        else:
            optimizer.create_state()

    def clip(self, model: nn.Module) -> torch.Tensor:
        """As [`~hf_tpu_ext.step.optimizer.clip_gradients`], unless the program of the step clips."""
        return self.replay.grad_norm if self.replays else clip_gradients(model, self._trainer.args.max_grad_norm)

    def keep_norm(self, find_norm: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The norm of the gradients, computed by `find_norm`, and kept where a replayed step puts it."""
        if self.replay is None:
            return find_norm()
        if not self.replay.replays:
            self.replay.grad_norm.copy_(find_norm())
        return self.replay.grad_norm

    # ---- Replay ----

    def _start_replay(self, model: nn.Module) -> None:
        trainer = self._trainer
        wanted = trainer.compiled.step_replay
        if wanted is False:
            return
        models = [model, *trainer._other_models()]
        why_not = partial(self._why_not_replay, models, assume_pure=wanted is True)
        self.why_not = why_not()
        if self.why_not is not None:
            warn_not_replayed(self.why_not)
            return
        self.replay = self.make_replay(
            models, METHODS_OF_A_STEP, state=self._tensors, why_not=why_not, settings=self._settings, training=True
        )

    def make_replay(
        self,
        models: Sequence[nn.Module],
        methods: tuple[str, ...],
        state: Callable[[], list[torch.Tensor]],
        why_not: Callable[[], str | None],
        settings: Callable[[], Any] | None = None,
        training: bool = False,
    ) -> StepReplay:
        """
        Make what replays programs of models, the first of which is that of the run, in which code of `methods` of the trainer
        runs. The others are as in [`StepReplay`]; `settings` are by default the dtypes of the models.
        """
        trainer = self._trainer
        own = partial(dtypes_of, models) if settings is None else settings
        return StepReplay(
            trainer.backend,
            models,
            state=state,
            note=partial(note_python_state, trainer, models, trainer.backend.programs.memory_of, methods=methods),
            settings=lambda: (own(), trainer.settings_of_programs()),
            why_not=why_not,
            copies=trainer.copies.context,
            assume_pure=trainer.compiled.step_replay is True,
            training=training,
        )

    def _stop_replay(self) -> None:
        if self.replay is None:
            return
        self.replay = None
        if isinstance(self._optimizer, LazyAdamW):
            self._optimizer.in_program = None

    def _why_not_replay(self, models: Sequence[nn.Module], assume_pure: bool) -> str | None:
        if not isinstance(self._optimizer, LazyAdamW):
            return (
                f"{type(self._optimizer).__name__} takes its learning rate as a Python number (optim=adamw_torch does "
                "not)"
            )
        if (setting := draws_other_layers(models[0])) is not None:
            return f"{setting} leaves out other layers at every step"
        if assume_pure or (found := find_own_code(self._trainer, models)) is None:
            return None
        return f"{found}; step_replay=True if it does the same at every step"

    def _tensors(self) -> list[torch.Tensor]:
        """What a step reads and changes, besides the model and its gradients; always in the same order."""
        trainer = self._trainer
        tensors = [*trainer.loss_log.tensors.values(), *trainer.metrics.changed_by("train")]
        for state in self._optimizer.state.values():
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        tensors += trainer.averaging.tensors.values()
        tensors += trainer._state_of_steps()
        if trainer.chips.local_gradients is not None:
            tensors += trainer.chips.local_gradients.tensors
        return tensors

    def _settings(self) -> Any:
        callbacks = self._trainer.callback_handler.callbacks
        return id(self._optimizer), self._optimizer.settings(), tuple(map(id, callbacks))
