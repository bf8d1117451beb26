"""Models whose layers run as one loop: when that is done, and what it means for the optimizer of the one that is trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainerControl
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...backends.base import Backend
from ...errors import UserError
from ...layers.frozen_weights import find_plain_linear
from ...layers.layer_list import Pattern, find_layers, find_patterns, why_layer_differs, why_layers_differ, why_no_loop
from ...layers.layer_scan import LayerStack
from ...layers.layer_trace import LayerTraces
from ...quantization.packed_linear import unpacked_once
from ...sharding import ShardingPlan
from ...step.optimizer import LazyAdamW
from ...temporarily import temporarily
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


class _Loop:
    """The layers of a `model`, in whose `place` is a `stack` for the time being, split over the chips of a `mesh`."""

    def __init__(
        self, model: nn.Module, place: tuple[nn.Module, str], stack: LayerStack, backend: Backend, mesh: dict[str, int]
    ):
        self.model, self.stack = model, stack
        self._backend, self._mesh = backend, mesh
        parent, self._name = place
        self._modules, self._layers = parent._modules, parent._modules[self._name]

    @property
    def is_in_place(self) -> bool:
        """Whether the layers run as one loop now."""
        return self._modules.get(self._name) is self.stack

    def put(self) -> None:
        """Run the layers as one loop from now on."""
        self.stack.stack()
        self._modules[self._name] = self.stack
        if self._backend.num_chips > 1:
            ShardingPlan(self.stack, self._mesh).apply(self.stack, self._backend)
        self._backend.wait()

    def take_out(self) -> None:
        """Give the layers their parameters back, if they run as one loop."""
        if self.is_in_place:
            # What is pending reads the stacked parameters.
            self._backend.flush()
            self.stack.unstack()
            self._modules[self._name] = self._layers
            self._backend.wait()

    @contextmanager
    def without_stack(self) -> Iterator[None]:
        """Within this context, the model has the modules of all layers, though not their parameters."""
        before, self._modules[self._name] = self._modules[self._name], self._layers
        try:
            yield
        finally:
            self._modules[self._name] = before

    def why_not_again(self, why_no_loop: Callable[[nn.Module, nn.ModuleList], str | None]) -> str | None:
        """Why the layers cannot run as this loop any more."""
        if self._modules.get(self._name) is not self._layers or list(self._layers) != self.stack.layers:
            return "the list of layers has changed"
        return why_no_loop(self.model, self._layers) or why_layers_differ(self._layers, self.stack.patterns)


class LayerScan:
    """
    Runs the layers of the models of a trainer as loops, see [`LayerStack`].

    The parameters of the trained model are stacked once the optimizer was made, which then trains the stacked ones, and are given back
    to the layers when training ends, and for as long as callbacks of the user's run. Checkpoints of the model and of the optimizer are
    those of the layers. Those of models that only run forward are stacked for a run, or for an evaluation.
    """

    def __init__(self, trainer):
        self._trainer, self._backend, self._adapted = trainer, trainer.backend, trainer.adapted
        self._chips = trainer.chips
        # Of the model that is trained: in the run under way, or in the last one.
        self._trained: _Loop | None = None
        # Of models that only run forward, while they do. `None` while none has been asked for.
        self._forward: list[_Loop] | None = None
        # Those of the last time, for the programs of the next evaluation to be of the same parameters.
        self._last: list[_Loop] = []
        self._said: set[str] = set()

    @property
    def _model(self) -> nn.Module:
        return self._trainer.model

    @property
    def stack(self) -> LayerStack | None:
        """The layers of the trained model in the run under way, or in the last one."""
        return None if self._trained is None else self._trained.stack

    @property
    def is_stacked(self) -> bool:
        """Whether the layers of the trained model run as one loop now."""
        return self._trained is not None and self._trained.is_in_place

    def parts_of(self, parameter: nn.Parameter) -> list[nn.Parameter] | None:
        """The parameters of the layers that one is stacked of; `None` for another one."""
        return None if self.stack is None else self.stack.parts_of(parameter)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the layers as one loop from now on, if wanted and possible. Wanted and impossible is a `ValueError`."""
        mode, model = self._adapted.scan_layers, self._model
        if mode == "off":
            return
        own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if self._trained is not None and own is not self._optimizer:
            # Another one was made since the last run.
            self._trained = None
        if self._trained is not None:
            self._take_up([self._trained])
            return
        if mode == "auto" and not self._is_worthwhile(model, self._adapted.rematerialization != "none"):
            return
        patterns = self._find_patterns(model, optimizer)
        if isinstance(patterns, str) and mode == "on":
            raise UserError(f"scan_layers='on' is not possible: {patterns}. Leave it out, or set it to 'auto'.")
        loop = self._make_loop(model, patterns, self._adapted.rematerialization)
        if loop is None:
            return
        self._trained, self._optimizer = loop, optimizer
        loop.put()
        optimizer.train_stacked({whole: loop.stack.parts_of(whole) for whole in loop.stack.tensors.values()})

    def _make_loop(self, model: nn.Module, patterns: list[Pattern] | str, policy: str) -> _Loop | None:
        if isinstance(patterns, str):
            self._say(f"scan_layers is off, layers {self._of(model)}are unrolled: {patterns}.")
            return None
        if not self._own_code_allows_scan():
            return None
        place = find_layers(model)
        layers = getattr(*place)
        # PEFT converts the input of an adapter to the dtype of its weight, ahead of dropout.
        plain = set() if isinstance(model, PeftModel) else find_plain_linear(model)
        by_rows = _are_by_rows(model, layers)
        stack = LayerStack(layers, self._backend, policy, by_rows, patterns, unpacked_once, plain)
        handler = self._trainer.callback_handler
        if "call_event" not in vars(handler):
            handler.call_event = partial(self._call_event, handler, handler.call_event)
        return _Loop(model, place, stack, self._backend, self._chips.mesh)

    def end(self) -> None:
        """Give the layers of the trained model their parameters back, if they run as one loop."""
        if self._trained is not None:
            self._trained.take_out()

    # ---- Models that only run forward ----

    @contextmanager
    def forward_loops(
        self, models: Sequence[nn.Module], weights: AbstractContextManager | None = None
    ) -> Iterator[None]:
        """
        Within this context and that of their `weights`, the layers of models, none of which is trained in it, run as loops where that is
        possible. An evaluation in the middle of training finds them as they are.
        """
        loops, is_outermost = self._forward, self._forward is None and self._backend.traces_steps
        if is_outermost:
            # Now: averages in place of weights would be taken for weights that code of the user's holds.
            loops = self._last = [loop for model in models if (loop := self._find_forward_loop(model)) is not None]
        with weights or nullcontext(), temporarily(self, _forward=loops), ExitStack() as stack:
            for loop in loops if is_outermost else ():
                stack.callback(loop.take_out)
                loop.put()
            yield

    def _find_forward_loop(self, model: nn.Module) -> _Loop | None:
        if self._adapted.scan_layers == "off" or not self._is_worthwhile(model, is_loop=True):
            return None
        for loop in self._last:
            if loop.model is model and loop.why_not_again(self._why_no_loop) is None:
                return loop if self._own_code_allows_scan() else None
        return self._make_loop(model, self._find_patterns(model), "full")

    # ---- Code of the user's that may look at layers ----

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.warning(line)

    def _of(self, model: nn.Module) -> str:
        base = unwrap_peft_model(model)
        return "" if model is self._model else f"of {base.name_or_path or type(base).__name__} "

    def _own_code_allows_scan(self) -> bool:
        models = [self._model, *self._trainer.other_models()]
        own_code = find_own_code(self._trainer, models) or find_own_code_between_steps(self._trainer)
        if own_code is None:
            return True
        if self._adapted.scan_layers == "on":
            self._say(
                f"scan_layers='on': {own_code}, and sees one layer with stacked parameters. Leave scan_layers out if it looks at "
                "layers."
            )
            return True
        self._say(
            f"scan_layers is off, layers are unrolled: {own_code}, which may look at them; scan_layers='on' if it does not."
        )
        return False

    @property
    def _loops(self) -> list[_Loop]:
        return [*([] if self._trained is None else [self._trained]), *(self._forward or ())]

    def _call_event(
        self, handler: CallbackHandler, call_event: Callable, event: str, *args, **kwargs
    ) -> TrainerControl | None:
        # With "on", it was said that what runs at every step looks at no layers.
        stays = EVENTS_AT_EVERY_STEP if self._adapted.scan_layers == "on" else EVENTS_OF_A_STEP
        if event in stays or not any(has_own_code(callback, event) for callback in handler.callbacks):
            return call_event(event, *args, **kwargs)
        with self.one_by_one():
            return call_event(event, *args, **kwargs)

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Within this context, between two steps, every layer has its own parameters."""
        loops = [loop for loop in self._loops if loop.is_in_place]
        if not loops:
            yield
            return
        self._trainer.steps.end()
        for loop in loops:
            loop.take_out()
        try:
            yield
        finally:
            self._take_up(loops)

    @contextmanager
    def as_loops(self) -> Iterator[None]:
        """Within this context layers run as loops, where a callback of the user's has them for the time being."""
        left = [loop for loop in self._loops if not loop.is_in_place]
        self._take_up(left)
        yield
        for loop in left:
            loop.take_out()

    def _take_up(self, loops: Sequence[_Loop]) -> None:
        """Stack layers again, unless they are not alike any more."""
        for loop in loops:
            if loop.is_in_place:
                continue
            reason = loop.why_not_again(self._why_no_loop)
            if reason is None:
                loop.put()
                continue
            logger.warning(f"scan_layers is off from here on, layers {self._of(loop.model)}are unrolled: {reason}.")
            if loop is not self._trained:
                self._forward.remove(loop)
                continue
            self._optimizer.train_parts()
            self._trainer.averaging.split(loop.stack)
            self._trained, self._adapted.scan_layers = None, "off"
            self._trainer.steps.make_gradients()
            self._backend.wait()

    def _why_no_loop(self, model: nn.Module, layers: nn.ModuleList) -> str | None:
        config = unwrap_peft_model(model).config
        for setting in ("output_hidden_states", "output_attentions"):
            if vars(config).get(setting):
                return f"{setting}=True needs an output of every layer"
        if self._backend.programs.find_aliases(list(layers.parameters())):
            return "user code holds weights of layers, as of a state_dict(), which have to follow the training"
        return why_no_loop(layers, self._chips.split_output)

    def in_place(self) -> AbstractContextManager[None]:
        """Context in which the trained model has the modules of all layers, though not their parameters: PEFT goes by modules."""
        return nullcontext() if self._trained is None else self._trained.without_stack()

    def _is_worthwhile(self, model: nn.Module, is_loop: bool) -> bool:
        """Whether a loop would make programs much smaller and, where layers are unrolled in it, the step no slower."""
        base = unwrap_peft_model(model)
        if not isinstance(base, PreTrainedModel) or (place := find_layers(base)) is None:
            return False
        layers, least = getattr(*place), 2 if self._adapted.scan_layers == "on" else _LEAST_LAYERS
        size = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
        return len(layers) >= least and (is_loop or size <= _MOST_UNROLLED)

    def _find_patterns(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Pattern] | str:
        """How the layers repeat, or why they do not run as a loop. With an `optimizer`, it trains them."""
        if optimizer is not None:
            if (self._trainer.args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1) != 1:
                return "the scan rematerializes every layer, and every_n_layers asks for some"
            if not isinstance(optimizer, LazyAdamW):
                return f"{type(optimizer).__name__} may look at parameters as a whole (optim='adamw_torch' does not)"
        base = unwrap_peft_model(model)
        if not isinstance(base, PreTrainedModel) or (place := find_layers(base)) is None:
            return "the model has no list of layers, or several"
        if adds_between_layers(base):
            return "features of images are added between the layers"
        layers = getattr(*place)
        if (reason := self._why_no_loop(base, layers)) is not None:
            return reason
        dtype, is_routed = self._adapted.compute_dtype, self._trainer.balances_experts
        traces = LayerTraces(base, place, self._backend, dtype, is_routed)
        if traces.refusal is not None:
            return traces.refusal
        groups = [[]] * len(layers) if optimizer is None else _groups_of_layers(layers, optimizer)

        def differ(earlier: int, number: int) -> str | None:
            reason = why_layer_differs(layers, earlier, number) or traces.why_differs(earlier, number)
            if reason is None and groups[earlier] != groups[number]:
                return f"layers {earlier} and {number} are in several parameter groups of the optimizer"
            return reason

        if patterns := find_patterns(len(layers), differ):
            return patterns
        return differ(0, 1) if len(layers) > 1 else "there is one layer"


def _are_by_rows(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether layers are known to compute each row of a batch by itself, and what they draw by its place."""
    return unwrap_peft_model(model).config.get_text_config().model_type in _BY_ROWS and all(
        is_known(type(module).__module__) for module in layers.modules()
    )


def _groups_of_layers(layers: nn.ModuleList, optimizer: torch.optim.Optimizer) -> list[list[int | None]]:
    """For each layer the parameter groups of its parameters."""
    group_of = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    return [[group_of.get(id(parameter)) for parameter in layer.parameters()] for layer in layers]
