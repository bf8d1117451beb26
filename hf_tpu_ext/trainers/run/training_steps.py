"""The training steps of a run: each is one compiled program, or its stages one by one where code of the user's runs between them."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ...backends.compiled_function import CompiledFunction
from ...backends.program_parts import ReadInRegion
from ...errors import UserError
from ...layers.activation_checkpointing import checkpoint_as_upstream, rematerialize
from ...layers.random_numbers import RandomNumbers
from ...step.optimizer import LazyAdamW, are_same
from ...step.train_step import MICRO_STEP, OPTIMIZER_STEP, GradientSums, train_step
from .eager_steps import CompiledLayers
from .programs import SentBatch
from .user_code import METHODS_OF_A_STEP, find_code_between_stages, sees_micro_steps


# Of a run with accumulation, where the program of an update goes by the micro-steps before it.
_TOWER_IS_LEFT = (
    "with gradient accumulation, steps without images leave the weights of the vision tower as they are. Freeze the tower, or give each "
    "row an image"
)


class TrainingSteps(TrainerCallback):
    """
    Owns the training steps of a trainer on XLA.

    Upstream's loop calls `training_step`. There the whole step is run as one program, see
    [`~hf_tpu_ext.step.train_step.train_step`]: traced, or by its handle. What upstream calls afterwards, to clip and to update,
    finds the work done. Where code of the user's runs between the backward pass and the update, or the optimizer is another than
    AdamW, upstream's loop calls the stages one by one, each step is traced, and its program ends at `on_step_end`, or at
    `on_substep_end` with gradient accumulation. This object stands behind upstream's `DefaultFlowCallback`, which says
    whether a step is logged, and ahead of all other callbacks, which find a step that has ended.

    A program that is run by its handle runs no Python of the model, the loss or the optimizer. What Python of known packages may
    have read is compared at each step. Where code of the user's runs inside a step, it is traced; `step_replay=True` says that this
    code does the same at every step.

    | `compiled` | `compiled.why_traced` | a step is |
    |---|---|---|
    | a function | `None` | traced for the first ones of a shape, then run by its handle |
    | a function | a clause | traced each time: one program with torch_xla, operators with torch_tpu |
    | `None` | | run stage by stage, by upstream's loop |
    """

    def __init__(self, trainer):
        self._trainer, self._backend, self._programs = trainer, trainer.backend, trainer.programs
        self._layers, self._averaging = trainer.layers, trainer.averaging
        self._chips, self._copies, self._callbacks = trainer.chips, trainer.copies, trainer.callback_handler
        self._log_loss, self._forward_backward = trainer.log_step_loss, trainer.forward_backward
        self._sometimes_unused = trainer.sometimes_unused
        #: The model of the run.
        self._model: nn.Module | None = None
        #: The steps of the run under way, or `None` where their stages run one by one.
        self.compiled: CompiledFunction | None = None
        #: Why the steps of the last run were traced, as a clause.
        self.why_traced: str | None = None
        #: Numbers that the step under way has on the device, besides the batch; none between steps.
        self.numbers: dict[str, torch.Tensor] = {}
        #: The norm of the gradients of the step under way, once it is known.
        self.grad_norm: torch.Tensor | None = None
        #: Where gradients are between micro-steps.
        self.gradients: GradientSums | None = None
        # By program, the optimizer's states that it updates. Forgotten where the model may have changed.
        self._updated_states: dict[Hashable, Sequence[Any]] = {}
        # The step whose stages run one by one, and which has not ended.
        self._under_way: str | None = None
        # What compiles layers where steps are not compiled whole, but run by operators.
        self._compiled_layers = CompiledLayers(self._backend)
        # The optimizer of the run, and where code of the user's may run between the stages of a step, as it was when that was
        # looked at last.
        self._optimizer: torch.optim.Optimizer | None = None
        self._user_code: dict[str, Hashable] = {}
        # Whether code of the user's runs between micro-steps.
        self._shows_gradients = False

    @property
    def replays(self) -> bool:
        """Whether the step under way, or the last one, is run by the handle of its program."""
        return self.compiled is not None and self.compiled.replays

    @property
    def may_be_replayed(self) -> bool:
        """Whether the step under way is run by the handle of its program, or traced for one."""
        return self.compiled is not None and self.compiled.why_traced is None

    @property
    def by_operators(self) -> bool:
        """Whether a step is run operator by operator, each of which is a program."""
        return self._backend.compiles_operators and not self.may_be_replayed

    # ---- A run ----

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        self._model = model
        self._trainer.begin_batches()
        with self._layers.in_place():
            self._rematerialize_layers()
        with self._layers.as_loops():
            self._begin_run()

    def _begin_run(self) -> None:
        self._note_user_code(self._find_user_code())
        if isinstance(self._optimizer, LazyAdamW):
            self._optimizer.sometimes_unused = self._sometimes_unused()
            self._optimizer.create_state()
        self._averaging.begin()
        self.make_gradients()
        self._copies.separate(self._model, self._optimizer)
        self._compile()
        self._trainer.begin_watch()
        self._trainer.reset_upstream_loss()
        self._backend.wait()

    def make_gradients(self) -> None:
        """Make the gradients of the model what they are between the steps of this run, and split the state over chips."""
        self.gradients = self._chips.gradients_of(self._model, self.gradients, self._trainer.why_not_local)
        self._chips.shard_training_state(self._model, self._optimizer, self.gradients, self._averaging.tensors)

    def on_train_end(self, args, state, control, **kwargs):
        self.end_run()

    def end_run(self) -> None:
        """Leave the model as it was before the run. Callbacks are not told of the end of one that fails."""
        self._under_way = self.compiled = self.grad_norm = None
        self._compiled_layers.end()
        if self.gradients is not None:
            for parameter in self._model.parameters():
                parameter.grad = None
            self.gradients = self._chips.local_gradients = None
            if isinstance(self._optimizer, LazyAdamW):
                self._optimizer.is_done = False

    # ---- A step ----

    def run(self, model, inputs, num_items_in_batch, numbers: dict[str, Any], sync_gradients: bool) -> torch.Tensor:
        """
        Run a micro-step, all of it or its first stages. `numbers` are on the host, and `sync_gradients` says whether it is the last of an
        optimizer step. Returned is what upstream adds to the loss that it would log: 0 where [`LossLog`] keeps the loss.
        """
        with self._copies.unwatched():
            if self.gradients.are_shown:
                self.gradients.take_back()
            self._follow_user_code()
            self.grad_norm = None
            numbers = {**numbers, "seed": self._trainer.seeds.next()}
            run_step = self._run_stages if self.compiled is None else self._run_program
            try:
                return run_step(model, inputs, num_items_in_batch, numbers, sync_gradients)
            finally:
                self.numbers = {}

    def _run_program(self, model, inputs, num_items_in_batch, numbers, sync_gradients) -> torch.Tensor:
        if not model.training:
            # Upstream does so at each step.
            model.train()
        optimizer = self._optimizer
        if sync_gradients:
            numbers["update"] = optimizer.numbers()
        else:
            # As `numbers()` does: the state is that of the program.
            optimizer.create_state()
        numbers["num_items_in_batch"] = num_items_in_batch
        data = self._trainer.send_batch(inputs, numbers)
        results = self._in_regions(
            partial(self.compiled, data, partial(self._end_program, sync_gradients), sync_gradients=sync_gradients)
        )
        if sync_gradients:
            self.grad_norm = results["grad_norm"]
            optimizer.is_done = True
            # `optimizer.step` counts those that were updated, of which a program that is run by its handle says nothing.
            states = self._updated_states.setdefault(self.compiled.key, optimizer.updated_states)
            if self.compiled.replays:
                optimizer.updated_states = states
            elif not are_same(states, optimizer.updated_states):
                self.compiled.refuse("the step updates other parameters than before")
        elif self._shows_gradients:
            self.gradients.show()
        return torch.zeros(())

    def _end_program(self, sync_gradients: bool, execute: Callable[[], Any] | None) -> Any:
        kind = OPTIMIZER_STEP if sync_gradients else MICRO_STEP
        if execute is None:
            # All operators have run, each by its own program. What they have compiled is counted when the step has ended.
            self._under_way = kind
            return None
        return self._programs.end(kind, f"step {self._programs.steps_done + 1}", execute=execute)

    def _train_step(self, data: dict[str, dict[Any, Any]], sync_gradients: bool) -> dict[str, torch.Tensor]:
        """The function that is compiled: one micro-step."""
        self.numbers = numbers = data["numbers"]
        if self.compiled.why_traced is not None:
            # The fingerprint is not compared while steps are traced, so the model is looked at here.
            self._prepare_model()
        optimizer = self._optimizer
        with self._random_numbers(numbers["seed"]):
            return train_step(
                self._forward_backward,
                self.gradients,
                self._log_loss,
                self._trainer.clip_as_upstream,
                optimizer.update_by_itself if self.by_operators else optimizer.update,
                self._model,
                SentBatch(data["batch"]),
                numbers,
                sync_gradients,
            )

    # ---- A step whose stages run one by one ----

    def _run_stages(self, model, inputs, num_items_in_batch, numbers, sync_gradients) -> torch.Tensor:
        """The stages up to the backward pass. The others are called by upstream's loop."""
        self._prepare_model()
        self._under_way = OPTIMIZER_STEP if sync_gradients else MICRO_STEP
        self.numbers, num_items_in_batch = self._backend.send(numbers), self._backend.send(num_items_in_batch)

        def compute_gradients() -> torch.Tensor:
            with self._random_numbers(self.numbers["seed"]), self.gradients.micro_step(sync_gradients):
                return self._forward_backward(model, inputs, num_items_in_batch)

        loss = self._in_regions(compute_gradients)
        if not sync_gradients:
            self.gradients.show()
        self._log_loss(loss, sync_gradients)
        return loss

    def _in_regions(self, compute: Callable[[], Any]) -> Any:
        """Run a forward and backward pass: on each chip by itself, until one turns out to need a value on the host."""
        try:
            return compute()
        except ReadInRegion:
            if self._chips.local_gradients is None:
                raise
        # Not above, where the error holds on to what was traced.
        self._chips.leave_regions()
        self.make_gradients()
        return compute()

    def _random_numbers(self, seed: torch.Tensor) -> AbstractContextManager:
        """Context in which random numbers follow from a seed. Layers that are compiled would take each seed for a constant of theirs."""
        return nullcontext() if self._compiled_layers.are_compiled else RandomNumbers(seed)

    def on_substep_end(self, args, state, control, **kwargs):
        self.end()

    def on_step_end(self, args, state, control, **kwargs):
        self.end(settle=control.should_log or control.should_evaluate or control.should_save)

    def end(self, settle: bool = False) -> None:
        """End the step that is under way, if there is one: run its program, and tell those who watch."""
        kind, self._under_way = self._under_way, None
        if kind is None:
            return
        if kind == OPTIMIZER_STEP:
            self.gradients.drop()
        # `on_step_end` is called when a step is counted, `on_substep_end` before that.
        steps = self._programs.steps_done
        self._programs.end(kind, f"step {steps if kind == OPTIMIZER_STEP else steps + 1}", settle=settle)

    # ---- Compiling ----

    def _compile(self) -> None:
        models = [self._model, *self._trainer.other_models()]
        if (reason := self._why_stage_by_stage()) is None:
            self.compiled = self._programs.compile(
                self._train_step,
                models,
                METHODS_OF_A_STEP,
                state=self._tensors,
                why_not=partial(self._find_why_traced, models),
                settings=self._settings,
                training=True,
                on_change=self._prepare_model,
                warn=self._fall_back,
            )
            reason = self.compiled.why_traced
        self.why_traced = reason
        if reason is not None and self._trainer.compile_step == "step" and self._backend.compiles_functions:
            raise UserError(f"compile_step='step' is not possible: {reason}. Leave it out, or set it to 'layers'.")
        if reason is not None and (self._programs.step_replay is not False or self._backend.compiles_functions):
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        """Say why steps are not replayed, as a clause, and compile their layers where that is what is left."""
        self.why_traced = reason
        if self._backend.compiles_functions:
            self._compiled_layers.begin(self._model, reason)
            self._rematerialize_layers()
        else:
            self._programs.warn_traced(reason)

    def _why_stage_by_stage(self) -> str | None:
        """Why the stages of a step run one by one, as a clause; `None` if they do not."""
        if not isinstance(self._optimizer, LazyAdamW):
            return (
                f"{type(self._optimizer).__name__} takes its learning rate as a Python number (optim=adamw_torch does "
                "not)"
            )
        return find_code_between_stages(self._trainer)

    def _find_why_traced(self, models: Sequence[nn.Module]) -> str | None:
        return (
            self._why_stage_by_stage()
            or (_TOWER_IS_LEFT if self.gradients.tensors and self._sometimes_unused() else None)
            or self._programs.why_traced(models, METHODS_OF_A_STEP)
        )

    def _find_user_code(self) -> dict[str, Hashable]:
        """Where code of the user's may run between the backward pass and the update, by the names that people are shown."""
        optimizer = self._trainer.optimizer.optimizer
        return {
            "the optimizer": id(optimizer),
            "the hooks of the optimizer": (
                len(optimizer._optimizer_step_pre_hooks),
                len(optimizer._optimizer_step_post_hooks),
            ),
            "the callbacks": tuple(map(id, self._callbacks.callbacks)),
            "the methods of the trainer": tuple(name in vars(self._trainer) for name in METHODS_OF_A_STEP),
        }

    def _follow_user_code(self) -> None:
        """Go on with an optimizer that a callback has put in the place of the run's own, and with callbacks that it has added."""
        if (user_code := self._find_user_code()) == self._user_code:
            return
        self._note_user_code(user_code)
        self._averaging.follow_optimizer()
        if self.compiled is None:
            return
        if (reason := self._why_stage_by_stage()) is None:
            self._optimizer.create_state()
            return
        self.compiled = None
        self._trainer.reset_upstream_loss()
        if not isinstance(self._optimizer, LazyAdamW):
            reason = f"the optimizer was replaced by {type(self._optimizer).__name__}"
        self._fall_back(reason)

    def _note_user_code(self, user_code: dict[str, Hashable]) -> None:
        self._user_code, self._optimizer = user_code, self._trainer.plain_optimizer
        self._shows_gradients = sees_micro_steps(self._callbacks.callbacks)

    def _prepare_model(self) -> None:
        """Have the model as steps want it, with gradients of what is trained now. Code of the user's may have changed it."""
        self._updated_states.clear()
        self._rematerialize_layers()
        if not self.gradients.are_of(self._model):
            self.make_gradients()
            # A trace begins with a state whose values are there.
            self._backend.flush()

    def _rematerialize_layers(self) -> None:
        """
        Put this package's checkpointing in the place of PyTorch's, which fails on XLA: again where a callback has switched it off and
        on, as TRL does to generate.
        """
        if self._compiled_layers.are_compiled:
            # PyTorch's own, since random numbers do not follow from a seed there.
            checkpoint_as_upstream(self._model)
        else:
            rematerialize(self._model, self._trainer.adapted.rematerialization, self._backend)

    def _tensors(self) -> list[torch.Tensor]:
        """What a step reads and changes, besides the model; always in the same order."""
        return [*self.gradients.tensors, *self._optimizer.state_tensors, *self._trainer.state_of_steps()]

    def _settings(self) -> dict[str, Any]:
        return {
            **self._user_code,
            "the optimizer's settings or parameters": self._optimizer.program_key,
            "how the trainer computes": self._trainer.settings_of_programs(),
        }
