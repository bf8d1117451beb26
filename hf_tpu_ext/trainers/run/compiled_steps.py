"""The training steps of a run, compiled: whole, or their layers one by one."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from tqdm.auto import tqdm
from transformers.utils import logging

from ...backends.base import Backend
from ...errors import UserError
from ...layers.layer_list import find_layers
from ...layers.random_numbers import draws_random_numbers
from ...step.optimizer import clip_gradients
from ...step.program_adamw import ProgramAdamW
from ...step.python_state import PythonState
from ...step.running_code import RunningCode
from ...step.train_step import MICRO_STEP, OPTIMIZER_STEP
from .eager_steps import EagerSteps
from .programs import SentBatch, note_python_state
from .user_code import find_own_code


logger = logging.get_logger(__name__)

# A step that was compiled anew so often because of Python that it reads is compiled no more.
_MOST_CHANGES = 3


class _CodeOfUser(Exception):
    """Code of the user's ran while a step was traced. The message names it."""


class CompiledSteps(EagerSteps):
    """
    Owns the training steps of a trainer on a device where a function of tensors can be compiled whole.

    A step is traced once for each shape of its batch: forward and backward pass, the sums of what is logged and, with AdamW,
    clipping and update. Upstream's loss runs as it is written while it is traced, and not at all afterwards. Where that would
    not give the same step, the model's layers are compiled one by one, and the rest is run operator by operator. A line
    says which, and why. What Python of known packages may have read is compared at each step, and where it has changed, as by a
    callback that sets `label_smoother.epsilon`, the step is compiled anew.

    Args:
        trainer ([`TPUTrainerMixin`]):
            The trainer.
        wanted (`str`):
            `compile_step` of [`ExtensionArguments`].
    """

    compiles_whole = True

    def __init__(self, trainer, wanted: str):
        super().__init__(trainer)
        self._wanted = wanted
        #: The model of the run.
        self._model: nn.Module | None = None
        self._step_programs: dict[Hashable, Callable] = {}
        # What Python could read while these were traced, and how often it has changed.
        self._python_state: PythonState | None = None
        self._changes = 0
        #: The norm of the gradients of the step under way, if its program clips and updates.
        self.grad_norm: torch.Tensor | None = None
        #: What is compiled: `"step"`, `"layers"` or `"operators"`.
        self.compiles = "operators"
        # What undoes that layers are compiled.
        self._layers: list[Callable[[], None]] = []

    # ---- A run ----

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._model = model
        reason = self._why_not_whole()
        if self._wanted == "step" and reason is not None:
            raise UserError(f"compile_step='step' is not possible: {reason}. Leave it out, or set it to 'layers'.")
        self.compiles = "step" if self._wanted in ("auto", "step") and reason is None else "layers"
        if self._wanted == "layers":
            reason = "compile_step='layers'"
        if self.compiles == "layers":
            reason = self._compile_layers(reason)
        if state.is_world_process_zero:
            tqdm.write(self._describe(reason))
        super().on_train_begin(args, state, control, **kwargs)

    def _compile_layers(self, reason: str) -> str:
        """Compile the layers one by one, if there are any. Returns why no more is compiled."""
        layers = find_layers(self._model)
        if layers is None:
            self.compiles = "operators"
            return f"{reason}, and the model has no list of layers"
        self.compiles = "layers"
        parent, name = layers
        self._layers = [self._backend.compile_module(layer) for layer in getattr(parent, name)]
        return reason

    def _follow_python(self) -> None:
        """Forget programs of steps that would be others now, and compile no more of them if they change again and again."""
        change = None if self._python_state is None else self._python_state.change()
        if change is None:
            return
        self._step_programs, self._python_state = {}, None
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            self._go_on_by_layers(f"{change}, and there were {_MOST_CHANGES} such changes before")
        else:
            logger.info(f"The step is compiled anew: {change}.")

    def _go_on_by_layers(self, reason: str) -> None:
        logger.warning(self._describe_layers(self._compile_layers(reason)))
        # Losses are added up on the device from here on.
        self._trainer.reset_upstream_loss()

    def _describe(self, reason: str | None) -> str:
        if self.compiles == "step":
            updates = isinstance(self._optimizer, ProgramAdamW)
            cut = ", in two programs: processes exchange gradients between them" * (self._backend.ranks.count > 1)
            return f"The step is compiled whole{', with its update' if updates else '; the optimizer is run by operators'}{cut}"
        return self._describe_layers(reason)

    def _describe_layers(self, reason: str | None) -> str:
        if self.compiles == "layers":
            return (
                f"The {len(self._layers)} layers are compiled one by one, and the rest is run by operators: {reason}"
            )
        return f"Steps are run by operators: {reason}"

    def _why_not_whole(self) -> str | None:
        trainer = self._trainer
        if self._wanted == "layers":
            return None
        if (found := find_own_code(trainer, [self._model, *trainer.other_models()])) is not None:
            return f"{found}, which may do something else at each step"
        if trainer.compiled.rematerialization != "none":
            return "with gradient_checkpointing, the compiler would find what is computed again to be there already"
        if trainer.models_beside():
            return "a step runs another model, too"
        if trainer.state_of_steps():
            return "a step keeps numbers for the next one"
        if self._backend.splits_weights:
            return "weights are split over processes, which gather those of a layer where it runs"
        setting = draws_random_numbers(self._model)
        if setting is None and trainer.args.neftune_noise_alpha is not None:
            setting = "neftune_noise_alpha"
        if setting is not None:
            return f"{setting} draws random numbers"
        if trainer.averaging.average is not None and isinstance(self._optimizer, ProgramAdamW):
            return "ema_decay follows the optimizer"
        return None

    def end_run(self) -> None:
        super().end_run()
        for undo in self._layers:
            undo()
        self._layers, self._step_programs, self.grad_norm = [], {}, None
        self._python_state, self._changes = None, 0

    @property
    def adds_nothing(self) -> bool:
        return self.compiles == "step"

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._trainer.plain_optimizer

    # ---- A step ----

    def run(
        self, model, inputs, num_items_in_batch, numbers: dict[str, Any], closing: bool, step: Callable
    ) -> torch.Tensor:
        self.grad_norm = None
        trainer = self._trainer
        if self.compiles == "step":
            # Upstream does so at each step.
            model.train()
            self._follow_python()
        if self.compiles != "step":
            return super().run(model, inputs, num_items_in_batch, numbers, closing, step)
        batch = trainer.send_batch(inputs)
        updates = closing and isinstance(self._optimizer, ProgramAdamW)
        self._under_way = OPTIMIZER_STEP if closing else MICRO_STEP
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in batch.items() if name not in tensors}
        data = {**self._backend.send(numbers), "items": num_items_in_batch}
        if not isinstance(num_items_in_batch, torch.Tensor):
            del data["items"]
            others["items"] = num_items_in_batch
        sums = {"loss": trainer.loss_log.tensors, "metrics": trainer.metric_sums("train")}
        state = _State(self._backend, model, self._optimizer, sums, trainer.args.max_grad_norm, closing, updates)
        arguments = [state.tensors(), tensors, data, state.rates()]
        key = (
            self._under_way,
            state.settings(),
            trainer.settings_of_programs(),
            tuple((name, value.shape, value.dtype) for name, value in tensors.items()),
            tuple((name, repr(value)) for name, value in others.items()),
        )
        if key not in self._step_programs:
            running = RunningCode()

            def traced(tensors, batch, data, rates):
                items = data["items"] if "items" in data else others["items"]
                given = SentBatch({**batch, **{name: value for name, value in others.items() if name != "items"}})
                self.data = data
                with state.replaced(tensors), trainer.micro_steps_as_data(data):
                    with running:
                        loss = step(model, given, items)
                    if running.found is not None:
                        raise _CodeOfUser(running.found)
                    trainer.log_step_loss(loss, closing)
                    return state.results(tensors, rates)

            try:
                self._step_programs[key] = self._backend.compile_function(traced, arguments)
            except _CodeOfUser as error:
                self._go_on_by_layers(f"{error}, which may do something else at each step")
                return super().run(model, inputs, num_items_in_batch, numbers, closing, step)
            # Parameters and buffers are given to it, and it is no matter where these are.
            given = [*model.parameters(), *model.buffers()]
            self._python_state = note_python_state(trainer, [model], _identities, given)
        self.grad_norm = state.take(self._step_programs[key](*arguments))
        if updates:
            self._optimizer.in_program = True
        # Kept by the log.
        return torch.zeros(())


def _identities(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(id, tensors))


class _State:
    """What a step reads and changes, as one structure of tensors."""

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sums: dict[str, dict[str, torch.Tensor]],
        max_grad_norm: float | None,
        closing: bool,
        updates: bool,
    ):
        self._backend, self._model, self._optimizer, self._sums = backend, model, optimizer, sums
        self._max_grad_norm, self._closing, self._updates = max_grad_norm, closing, updates
        self._names = dict(model.named_parameters())
        if updates:
            optimizer.create_state()

    def tensors(self) -> dict[str, Any]:
        """The present values."""
        held = {
            "parameters": {name: parameter.detach() for name, parameter in self._names.items()},
            "gradients": {name: value.grad for name, value in self._names.items() if value.grad is not None},
            "buffers": dict(self._model.named_buffers()),
            "sums": {name: dict(sums) for name, sums in self._sums.items()},
        }
        if self._updates:
            held["moments"] = {
                name: dict(self._optimizer.state[parameter])
                for name, parameter in self._names.items()
                if parameter in self._optimizer.state
            }
        return held

    def rates(self) -> list[torch.Tensor]:
        """Learning rates, as data."""
        rates = [torch.tensor(group["lr"], dtype=torch.float32) for group in self._optimizer.param_groups]
        return self._backend.send(rates) if self._updates else []

    def settings(self) -> Hashable:
        """What else a program depends on."""
        groups = [
            tuple((key, repr(value)) for key, value in group.items() if key not in ("params", "lr", "initial_lr"))
            for group in self._optimizer.param_groups
        ]
        gradients = tuple(parameter.grad is not None for parameter in self._names.values())
        required = tuple(parameter.requires_grad for parameter in self._names.values())
        return tuple(groups), gradients, required, self._max_grad_norm, self._updates

    @contextmanager
    def replaced(self, tensors: dict[str, Any]) -> Iterator[None]:
        """Context in which the model and the sums are these tensors, while a step is traced."""
        leaves = {}
        for name, parameter in self._names.items():
            leaves[name] = tensors["parameters"][name].detach().requires_grad_(parameter.requires_grad)
            if name in tensors["gradients"]:
                # Added to in place, which is not to be seen from outside.
                leaves[name].grad = tensors["gradients"][name].clone()
        kept = {name: dict(sums) for name, sums in self._sums.items()}
        for name, sums in self._sums.items():
            sums.update(tensors["sums"][name])
        try:
            with _reparametrize_module(self._model, {**leaves, **tensors["buffers"]}, tie_weights=True):
                yield
        finally:
            for name, sums in self._sums.items():
                sums.clear()
                sums.update(kept[name])

    def results(self, tensors: dict[str, Any], rates: list[torch.Tensor]) -> dict[str, Any]:
        """What a traced step has made, within `replaced`. With its update, the weights and moments are changed in place."""
        results: dict[str, Any] = {"sums": {name: dict(sums) for name, sums in self._sums.items()}}
        leaves = dict(self._model.named_parameters())
        if self._closing:
            used = [leaf for leaf in leaves.values() if leaf.grad is not None]
            for leaf, mean in zip(used, self._backend.ranks.mean([leaf.grad for leaf in used]), strict=True):
                leaf.grad = mean
        if not self._updates:
            results["gradients"] = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            return results
        with torch.no_grad():
            results["norm"] = clip_gradients(self._model, self._max_grad_norm)
            names = {parameter: name for name, parameter in self._names.items()}
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                used = [names[parameter] for parameter in group["params"] if leaves[names[parameter]].grad is not None]
                self._optimizer.update(
                    group,
                    rate,
                    [tensors["parameters"][name] for name in used],
                    [leaves[name].grad for name in used],
                    [tensors["moments"][name] for name in used],
                )
        return results

    def take(self, results: dict[str, Any]) -> torch.Tensor | None:
        """Take what a program has made. Returns the norm of the gradients, if it was found."""
        for name, sums in self._sums.items():
            sums.update(results["sums"][name])
        gradients = results.get("gradients", {})
        for name, parameter in self._names.items():
            parameter.grad = gradients.get(name)
        return results.get("norm")
