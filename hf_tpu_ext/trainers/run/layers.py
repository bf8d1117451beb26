"""Training with the layers as one loop: when it is done, and what it means for the optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainerControl
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...errors import UserError
from ...layers.frozen_weights import find_plain_linear
from ...layers.layer_list import Pattern, find_layers, find_patterns, why_layer_differs, why_layers_differ, why_no_loop
from ...layers.layer_scan import LayerStack
from ...layers.layer_trace import LayerTraces
from ...quantization.packed_linear import unpacked_once
from ...sharding import ShardingPlan
from ...step.optimizer import LazyAdamW
from ...vision.model import adds_between_layers
from .user_code import (
    EVENTS_AT_EVERY_STEP,
    EVENTS_OF_A_STEP,
    find_own_code,
    find_own_code_between_steps,
    has_own_code,
    is_known,
)


logger = logging.get_logger(__name__)

#: Families whose layers were found to compute each token by itself, attention aside.
VERIFIED = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# Families whose layers also compute each row of a batch by itself.
_BY_ROWS = ("gemma2", "gemma3_text", *VERIFIED)
# With fewer layers there is little to gain.
_LEAST_LAYERS = 8
# Weights of a layer. With more, a chip takes longer than the host, and by the compiler's estimate some percent longer if layers
# that are unrolled have stacked parameters.
_MOST_UNROLLED = 2**22


class LayerScan:
    """
    Trains the layers of a model as one loop, see [`LayerStack`].

    The parameters are stacked once the optimizer was made, which then trains the stacked ones, and are given back to
    the layers when training ends, and for as long as callbacks of the user's run. Checkpoints of the model and of the
    optimizer are those of the layers.
    """

    def __init__(self, trainer):
        self._trainer, self._backend, self._compiled = trainer, trainer.backend, trainer.compiled
        self._chips = trainer.chips
        #: The layers of the run under way, or of the last one.
        self.stack: LayerStack | None = None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the layers as one loop from now on, if wanted and possible. Wanted and impossible is a `ValueError`."""
        mode = self._compiled.scan_layers
        if mode == "off":
            return
        own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if self.stack is not None and own is not self._optimizer:
            # Another one was made since the last run.
            self.stack = None
        if self.stack is None:
            if mode == "auto" and not self._is_worthwhile():
                return
            patterns = self._find_patterns(optimizer)
            if isinstance(patterns, str):
                if mode == "on":
                    raise UserError(
                        f"scan_layers='on' is not possible: {patterns}. Leave it out, or set it to 'auto'."
                    )
                logger.warning(f"scan_layers is off, layers are unrolled: {patterns}.")
                return
            if not self._own_code_allows_scan():
                return
            parent, name = find_layers(self._model)
            layers, policy = getattr(parent, name), self._compiled.rematerialization
            by_rows = self._are_by_rows(layers)
            # PEFT converts the input of an adapter to the dtype of its weight, ahead of dropout.
            plain = set() if isinstance(self._model, PeftModel) else find_plain_linear(self._model)
            self.stack = LayerStack(layers, self._backend, policy, by_rows, patterns, unpacked_once, plain)
            self._place_of_layers = (parent._modules, name, parent._modules[name])
            handler = self._trainer.callback_handler
            if "call_event" not in vars(handler):
                handler.call_event = partial(self._call_event, handler, handler.call_event)
            self.stack.stack()
            self._optimizer = optimizer
            optimizer.train_stacked({whole: self.stack.parts_of(whole) for whole in self.stack.tensors.values()})
            self._put_stack()
        elif not self.is_stacked:
            self._take_up_loop()

    @property
    def _model(self) -> nn.Module:
        return self._trainer.model

    @property
    def is_stacked(self) -> bool:
        """Whether the layers run as one loop now."""
        if self.stack is None:
            return False
        modules, name, _ = self._place_of_layers
        return modules.get(name) is self.stack

    def parts_of(self, parameter: nn.Parameter) -> list[nn.Parameter] | None:
        """The parameters of the layers that one is stacked of; `None` for another one."""
        return None if self.stack is None else self.stack.parts_of(parameter)

    def _put_stack(self) -> None:
        modules, name, _ = self._place_of_layers
        modules[name] = self.stack
        if self._backend.num_chips > 1:
            ShardingPlan(self.stack, self._chips.mesh).apply(self.stack, self._backend)
        self._backend.wait()

    def end(self) -> None:
        """Give the layers their parameters back, if they run as one loop."""
        if self.is_stacked:
            # What is pending reads the stacked parameters.
            self._backend.flush()
            modules, name, layers = self._place_of_layers
            self.stack.unstack()
            modules[name] = layers
            self._backend.wait()

    def _are_by_rows(self, layers: nn.ModuleList) -> bool:
        """Whether layers are known to compute each row of a batch by itself, and what they draw by its place."""
        model = unwrap_peft_model(self._model)
        return model.config.get_text_config().model_type in _BY_ROWS and all(
            is_known(type(module).__module__) for module in layers.modules()
        )

    # ---- Code of the user's that may look at layers ----

    def _own_code_allows_scan(self) -> bool:
        models = [self._model, *self._trainer.other_models()]
        own_code = find_own_code(self._trainer, models) or find_own_code_between_steps(self._trainer)
        if own_code is None:
            return True
        if self._compiled.scan_layers == "on":
            logger.warning(
                f"scan_layers='on': {own_code}, and sees one layer with stacked parameters. Leave scan_layers out if it looks at "
                "layers."
            )
            return True
        logger.warning(
            f"scan_layers is off, layers are unrolled: {own_code}, which may look at them; scan_layers='on' if it does not."
        )
        return False

    def _call_event(
        self, handler: CallbackHandler, call_event: Callable, event: str, *args, **kwargs
    ) -> TrainerControl | None:
        # With "on", it was said that what runs at every step looks at no layers.
        stays = EVENTS_AT_EVERY_STEP if self._compiled.scan_layers == "on" else EVENTS_OF_A_STEP
        if (
            not self.is_stacked
            or event in stays
            or not any(has_own_code(callback, event) for callback in handler.callbacks)
        ):
            return call_event(event, *args, **kwargs)
        with self.one_by_one():
            return call_event(event, *args, **kwargs)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within this context, between two steps, every layer has its own parameters."""
        if not self.is_stacked:
            yield
            return
        self._trainer.steps.end()
        self.end()
        try:
            yield
        finally:
            self._take_up_loop()

    @contextmanager
    def as_a_loop(self) -> Iterator[None]:
        """Within this context layers run as a loop, where a callback of the user's has them for the time being."""
        is_left = self.stack is not None and not self.is_stacked
        if is_left:
            self._take_up_loop()
        yield
        if is_left:
            self.end()

    def _take_up_loop(self) -> None:
        """Stack the layers again, unless they are not alike any more."""
        if self.stack is None or self.is_stacked:
            return
        modules, name, layers = self._place_of_layers
        reason = "the list of layers has changed"
        if modules.get(name) is layers and list(layers) == self.stack.layers:
            reason = self._why_no_loop(layers) or why_layers_differ(layers, self.stack.patterns)
        if reason is None:
            self.stack.stack()
            self._put_stack()
            return
        logger.warning(f"scan_layers is off from here on, layers are unrolled: {reason}.")
        self._optimizer.train_parts()
        self._trainer.averaging.split(self.stack)
        self.stack, self._compiled.scan_layers = None, "off"
        self._trainer.steps.make_gradients()
        self._backend.wait()

    def _why_no_loop(self, layers: nn.ModuleList) -> str | None:
        config = unwrap_peft_model(self._model).config
        for setting in ("output_hidden_states", "output_attentions"):
            if vars(config).get(setting):
                return f"{setting}=True needs an output of every layer"
        if self._backend.programs.find_aliases(list(layers.parameters())):
            return "user code holds weights of layers, as of a state_dict(), which have to follow the training"
        return why_no_loop(layers, self._chips.split_output)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context, the model has the modules of all layers, though not their parameters: PEFT goes by modules."""
        if self.stack is None:
            yield
            return
        modules, name, layers = self._place_of_layers
        before, modules[name] = modules[name], layers
        try:
            yield
        finally:
            modules[name] = before

    def _is_worthwhile(self) -> bool:
        """Whether a loop would make the program of the step much smaller and the step no slower."""
        model = unwrap_peft_model(self._model)
        if not isinstance(model, PreTrainedModel) or (place := find_layers(model)) is None:
            return False
        layers = getattr(*place)
        size = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
        is_loop = self._compiled.rematerialization != "none"
        return len(layers) >= _LEAST_LAYERS and (is_loop or size <= _MOST_UNROLLED)

    def _find_patterns(self, optimizer: torch.optim.Optimizer) -> list[Pattern] | str:
        """How the layers repeat, or why they do not run as a loop."""
        if (self._trainer.args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1) != 1:
            return "the scan rematerializes every layer, and every_n_layers asks for some"
        if not isinstance(optimizer, LazyAdamW):
            return f"{type(optimizer).__name__} may look at parameters as a whole (optim='adamw_torch' does not)"
        model = unwrap_peft_model(self._model)
        if not isinstance(model, PreTrainedModel) or (place := find_layers(model)) is None:
            return "the model has no list of layers, or several"
        if adds_between_layers(model):
            return "features of images are added between the layers"
        layers = getattr(*place)
        if (reason := self._why_no_loop(layers)) is not None:
            return reason
        dtype, is_routed = self._compiled.compute_dtype, self._trainer.balances_experts
        traces = LayerTraces(model, place, self._backend, dtype, is_routed)
        if traces.refusal is not None:
            return traces.refusal
        groups = _groups_of_layers(layers, optimizer)

        def differ(earlier: int, number: int) -> str | None:
            reason = why_layer_differs(layers, earlier, number) or traces.why_differs(earlier, number)
            if reason is None and groups[earlier] != groups[number]:
                return f"layers {earlier} and {number} are in several parameter groups of the optimizer"
            return reason

        if patterns := find_patterns(len(layers), differ):
            return patterns
        return differ(0, 1) if len(layers) > 1 else "there is one layer"


def _groups_of_layers(layers: nn.ModuleList, optimizer: torch.optim.Optimizer) -> list[list[int | None]]:
    """For each layer the parameter groups of its parameters."""
    group_of = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    return [[group_of.get(id(parameter)) for parameter in layer.parameters()] for layer in layers]
