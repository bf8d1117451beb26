"""The training steps of a run on a device that runs operators one by one, and compiles each of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from ...backends.base import Backend
from ...errors import UserError
from ...layers.layer_list import find_layers
from ...step.train_step import MICRO_STEP, OPTIMIZER_STEP, average_gradients
from ...temporarily import temporarily
from .programs import SentBatch


logger = logging.get_logger(__name__)


def check_split(mesh: str, generates: bool, is_quantized: bool) -> None:
    """
    Refuse (`ValueError`) what does not train where processes hold parts of the weights, besides fields: steps that write text,
    and a model that has quantized weights.
    """
    if generates:
        raise UserError(
            f"mesh={mesh!r} does not work with a trainer that generates text within its steps: each chip would hold parts of "
            "the weights, and needs all of them for every token. Set mesh='data'."
        )
    if is_quantized:
        raise UserError(
            f"a model with quantized weights does not work with mesh={mesh!r}, of which each chip holds parts of the weights. Leave it "
            "out, or set mesh='data'."
        )


class CompiledLayers:
    """Compiles the layers of a model for a run, each as a program of its own; the rest of a step is run by operators."""

    def __init__(self, backend: Backend):
        self._backend = backend
        #: Whether layers are compiled now.
        self.are_compiled = False
        # What leaves each of them as it was.
        self._undo: list[Callable[[], None]] = []

    def begin(self, model: nn.Module, reason: str) -> None:
        """Compile the layers, if there are any, and say why no more is compiled: `reason` is a clause."""
        layers = find_layers(model)
        if layers is not None and not self._undo:
            parent, name = layers
            self._undo = [self._backend.compile_module(layer) for layer in getattr(parent, name)]
            self.are_compiled = bool(self._undo)
        words = "layer is compiled" if len(self._undo) == 1 else f"{len(self._undo)} layers are compiled one by one"
        logger.warning(
            f"The {words}, and the rest is run by operators: {reason}."
            if self._undo
            else f"Steps are run by operators: {reason}, and the model has no list of layers."
        )

    def end(self) -> None:
        """Leave the layers as they were."""
        for undo in self._undo:
            undo()
        self._undo, self.are_compiled = [], False


class EagerSteps(TrainerCallback):
    """
    Owns the training steps of a trainer where they are run by upstream's loop, operator by operator.

    Upstream's `training_step` runs as it is written. The loss stays on the device until a log. After the optimizer the step
    ends, and what it had compiled is counted and explained: at the first step of each shape, and before a log, an evaluation or a
    checkpoint, which wait for the device anyway. With `why_layers` the layers of the model are compiled; it says why no more is, as a
    clause.
    """

    #: Steps are not run by the handle of their program, as those of [`TrainingSteps`] are.
    compiled = why_traced = None
    replays = False
    #: The norm of the gradients of the step under way, where its program has clipped them.
    grad_norm: torch.Tensor | None = None

    def __init__(self, trainer, why_layers: str | None = None):
        self._trainer, self._backend, self._programs = trainer, trainer.backend, trainer.programs
        self._layers, self._why_layers = CompiledLayers(self._backend), why_layers
        # The step that has begun and not ended.
        self._under_way: str | None = None
        # The last step whose compiles were counted.
        self._counted_step = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        # What was a number before the update that is under way: of each group of the optimizer its learning rate.
        self._rates: list[tuple[dict[str, Any], float]] = []
        #: Numbers that the step under way has on the device, besides the batch; none between steps.
        self.numbers: dict[str, torch.Tensor] = {}

    # ---- A run ----

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        self._counted_step = state.global_step
        if self._why_layers is not None:
            self._layers.begin(model, self._why_layers)
        self._trainer.begin_batches()
        self._trainer.begin_watch()
        self._trainer.reset_upstream_loss()
        if isinstance(optimizer.optimizer, torch.optim.AdamW) and optimizer.optimizer.defaults["fused"]:
            # A tensor is taken for data.
            self._hooks = [
                optimizer.optimizer.register_step_pre_hook(self._send_rates),
                optimizer.optimizer.register_step_post_hook(self._restore_rates),
            ]

    def on_train_end(self, args, state, control, **kwargs):
        self.end_run()

    def end_run(self) -> None:
        """Leave the trainer as it was before the run. Callbacks are not told of the end of one that fails."""
        self._under_way = None
        # PyTorch does not call the hook after an update that fails.
        self._restore_rates()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._layers.end()

    # A rate of exactly 0, as in the first step of a warm-up, would be a constant, and the update another program.

    def _send_rates(self, optimizer: torch.optim.Optimizer, *_) -> None:
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates:
            group["lr"] = self._backend.send(torch.tensor(rate, dtype=torch.float32))

    def _restore_rates(self, *_) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    # ---- A step ----

    def run(self, model, inputs, num_items_in_batch, numbers: dict[str, Any], sync_gradients: bool) -> torch.Tensor:
        """
        Run a micro-step, by upstream's own code. `numbers` are on the host, and `sync_gradients` says whether it is the last of an
        optimizer step. Returns the loss, on the device.
        """
        trainer = self._trainer
        if trainer.generates:
            # What it writes is no part of the step. Upstream's step begins so, too.
            model.train()
            inputs = SentBatch(trainer.send_batch(inputs)["batch"])
        self._under_way = OPTIMIZER_STEP if sync_gradients else MICRO_STEP
        with temporarily(self, numbers=self._backend.send(numbers) if trainer.generates else {}):
            loss = trainer.forward_backward(model, inputs, num_items_in_batch)
        trainer.log_step_loss(loss, sync_gradients)
        if sync_gradients and not self._backend.splits_weights:
            # Split ones are exchanged in the backward pass, a layer at a time.
            average_gradients(model, self._backend.processes)
        return loss

    def on_substep_end(self, args, state, control, **kwargs):
        self._end(settle=False)

    def on_step_end(self, args, state, control, **kwargs):
        # Upstream's own callback is before this one.
        self._end(settle=control.should_log or control.should_evaluate or control.should_save)

    def _end(self, settle: bool) -> None:
        kind, self._under_way = self._under_way, None
        if kind is None:
            return
        steps = self._programs.steps_done
        step = steps if kind == OPTIMIZER_STEP else steps + 1
        where = f"step {step}" if step <= self._counted_step + 1 else f"steps {self._counted_step + 1} to {step}"
        self._programs.end(kind, where, settle=settle)
        if settle:
            self._counted_step = steps
