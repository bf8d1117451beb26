"""Layers that repeat as the iterations of one loop: a program that does not grow with their number."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.cache_utils import Cache

from ..backends.base import Backend
from ..temporarily import temporarily
from .layer_list import CalledLayers, Pattern
from .pattern_loop import Derivations, PatternLoop, Template, place_of
from .static_cache import StaticKeyValueCache


# Bytes of parameters that are stacked or unstacked in one program. They are in memory twice until it has run.
_AT_ONCE = 2**28


class LayerStack(CalledLayers):
    """
    Stands in for the layers of a model. Those of a [`Pattern`] are a loop; the rest runs as before. Of the layers in the same run
    of a pattern, there is one parameter or buffer for each name: `(layers, ...)`. A host has as few tensors to handle as for one layer
    of each run.

    Its state dict has the names and the tensors of the layers, and so can be saved and loaded. The model calls the layers one by
    one: the loop runs when it calls the last of them.

    Args:
        layers ([`~torch.nn.ModuleList`]):
            The layers. Those of the pattern have no parameters while the stack is in use.
        backend ([`Backend`]): The backend in use.
        rematerialization (`str`):
            What the backward pass computes again: `"full"`, whole layers; `"dots"`, the same but for matrix products
            with weights; `"none"`, nothing, and no loop either: layers that get gradients are unrolled.
        by_rows (`bool`, *optional*, defaults to `False`):
            Whether layers compute each row by itself, so that they can go through [`RowBlocks`].
        patterns (`Sequence[Pattern]`, *optional*):
            How they repeat, see [`~hf_tpu_ext.layers.layer_list.find_patterns`]. Default: all of them are the same.
        derive (`Callable[[nn.Module], Derivations]`, *optional*):
            Says which tensors are computed from a layer's frozen parameters when the layer begins, once for all that reads them.
        plain (`Collection[torch.nn.Linear]`, *optional*):
            Linear layers whose weight may as well have the dtype that autocast makes it, and the gradient of it.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        backend: Backend,
        rematerialization: str,
        by_rows: bool = False,
        patterns: Sequence[Pattern] = (),
        derive: Callable[[nn.Module], Derivations] = lambda layer: {},
        plain: Collection[nn.Linear] = (),
    ):
        super().__init__(layers)
        #: How the layers repeat.
        self.patterns = list(patterns) or [Pattern(0, (1,), len(layers))]
        self._backend, self._rematerialization = backend, rematerialization
        self._loops: list[PatternLoop] = []
        self._templates: list[Template] = []
        for pattern in self.patterns:
            first_layers = [self._layers[numbers[0]] for numbers in pattern.numbers]
            templates = [
                Template(numbers, layer, derive(layer), plain)
                for numbers, layer in zip(pattern.numbers, first_layers, strict=True)
            ]
            self._loops.append(PatternLoop(pattern, templates, backend, rematerialization == "dots", by_rows))
            self._templates += templates
        # For each layer of a pattern, its loop.
        self._loop_of = {number: loop for loop in self._loops for number in loop.places}
        # The others of a pattern are no part of the model meanwhile, and what its code reads is the same in the first of them.
        first = {template.numbers[0] for template in self._templates}
        for number, layer in enumerate(self._layers):
            if number in first or number not in self._loop_of:
                self.add_module(str(number), layer)
        # Those of the layers by the name of the stacked one. Parameters have no values while the stack is in use.
        self._parts: dict[str, list[Tensor]] = {}
        #: The parameters and buffers by their names in the stack.
        self.tensors: dict[str, Tensor] = {}
        # What each layer reads in place of its parameters.
        self._read: Sequence[Tensor] | None = None
        # For layers that are unrolled, while the model calls them: what they read, by the name of the stacked parameter.
        self._parts_of_stacked: dict[str, Sequence[Tensor]] = {}
        self.register_state_dict_post_hook(_split_state)
        self.register_load_state_dict_pre_hook(_stack_state)

    def parts_of(self, parameter: nn.Parameter) -> list[nn.Parameter] | None:
        """The parameters of the layers that one is stacked of; `None` for another one."""
        return next((self._parts[name] for name, whole in self.tensors.items() if whole is parameter), None)

    def looped_modules(self) -> Iterator[nn.Module]:
        """The modules whose parameters are stacked."""
        for template in self._templates:
            yield from template.layer.modules()

    def weights(self) -> Iterator[tuple[Tensor, nn.Linear | None]]:
        """What the layers of the loops compute with now, each with its module if it is the matrix of a linear layer."""
        for template in self._templates:
            for name, weight in zip(template.names, template.weights(), strict=True):
                path, _, attribute = name.rpartition(".")
                module = template.layer.get_submodule(path)
                is_linear = attribute == "weight" and isinstance(module, nn.Linear)
                yield weight, module if is_linear else None

    def reading(self, parts: Sequence[Tensor]) -> AbstractContextManager:
        """Within this context, tokens after a prompt read parts of [`~LayerStack.weights`], those of one for all layers first."""
        return temporarily(self, _read=parts)

    # ---- Parameters ----

    @torch.no_grad()
    def stack(self) -> None:
        """Take the parameters of the layers. A second time, into the same parameters where their dtype is the same."""
        nothing, pending = torch.empty(0, device=self._backend.device), 0
        for template in self._templates:
            layers = [self._layers[number] for number in template.numbers]
            for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
                places = [place_of(layer, name) for layer in layers]
                self._parts[stacked_name] = parts = [tensors[attribute] for tensors, attribute in places]
                whole, is_trained = torch.stack(parts), parts[0].requires_grad
                is_parameter = isinstance(parts[0], nn.Parameter)
                if stacked_name in self.tensors and self.tensors[stacked_name].dtype == whole.dtype:
                    self.tensors[stacked_name].data = whole
                    self.tensors[stacked_name].requires_grad_(is_trained)
                else:
                    self.tensors[stacked_name] = nn.Parameter(whole, is_trained) if is_parameter else whole
                for (tensors, attribute), part in zip(places, parts, strict=True):
                    if is_parameter:
                        # A buffer may be another one, too.
                        part.data = nothing
                    tensors[attribute] = None
                tensors, attribute = places[0]
                tensors[attribute] = self.tensors[stacked_name]
                pending = self._flush(pending + whole.nbytes)
            # The loop computes the layer again by itself.
            template.checkpoints = template.layer.gradient_checkpointing
            template.layer.gradient_checkpointing = False
        self._backend.flush()

    @torch.no_grad()
    def unstack(self) -> None:
        """Give the layers their parameters back: the same ones that they had, with their current values."""
        nothing, pending = torch.empty(0, device=self._backend.device), 0
        # As data: slices at constant numbers take XLA on a CPU up to half a minute to compile.
        most = max(len(template.numbers) for template in self._templates)
        indices = self._backend.send([torch.tensor([index]) for index in range(most)])
        for template in self._templates:
            layers = [self._layers[number] for number in template.numbers]
            for layer in layers:
                layer.train(template.layer.training)
                # Of all: it may be an attribute of the class alone, and layers with other attributes are not alike.
                layer.gradient_checkpointing = template.checkpoints
            for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
                whole, parts = self.tensors[stacked_name], self._parts[stacked_name]
                for index, layer, part in zip(indices, layers, parts, strict=False):
                    part.data = whole.index_select(0, index)[0]
                    part.requires_grad_(whole.requires_grad)
                    tensors, attribute = place_of(layer, name)
                    tensors[attribute] = part
                pending = self._flush(pending + whole.nbytes)
                whole.data = nothing.to(whole.dtype)
        self._backend.flush()

    def _flush(self, pending: int) -> int:
        """Run what was traced where it is large, and return how many bytes are still to be run."""
        if pending <= _AT_ONCE:
            return pending
        self._backend.flush()
        return 0

    # ---- Calls ----

    def call_layer(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """
        Run a layer of the rest, or one that is unrolled. One of a loop is noted, and the loop runs with the last of them; until
        then, a layer returns its input.
        """
        if number not in self._loop_of:
            return self._layers[number](hidden, *args, **kwargs)
        # By type: upstream has renamed the argument, in transformers 5.24, and a cache inside a loop crashes torch_xla.
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        is_prompt = isinstance(cache, StaticKeyValueCache) and cache.index is None
        if not is_prompt and (cache is not None or (self._rematerialization == "none" and torch.is_grad_enabled())):
            # Of tokens after a prompt, each layer has its own place in the cache, which a loop would copy at every iteration.
            return self._call_unrolled(number, hidden, args, kwargs, has_cache=cache is not None)
        return self._loop_of[number].call_layer(number, hidden, args, kwargs, cache if is_prompt else None)

    def _call_unrolled(
        self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any], has_cache: bool
    ) -> Tensor:
        if number == self.patterns[0].first:
            # Once for all: the gradient of each part by itself would be as large as the whole.
            weights = (weight for template in self._templates for weight in template.weights())
            parts = chain.from_iterable(map(Tensor.unbind, weights)) if self._read is None else iter(self._read)
            self._parts_of_stacked = {
                name: list(islice(parts, len(template.numbers)))
                for template in self._templates
                for name in template.stacked_names
            }
        template, index = self._loop_of[number].places[number]
        layer = self._layers[number] if has_cache else template.layer
        layer.train(template.layer.training)
        names = zip(template.names, template.stacked_names, strict=True)
        parts = {name: self._parts_of_stacked[stacked_name][index] for name, stacked_name in names}
        if number == self.patterns[-1].end - 1:
            self._parts_of_stacked = {}
        return functional_call(layer, parts, (hidden, *args), kwargs)


def _split_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, _) -> None:
    keys = [prefix + name for name in stack.tensors if prefix + name in state_dict]
    # On the host: on the device they would be there twice.
    host_state = stack._backend.fetch({key: state_dict.pop(key) for key in keys})
    for template in stack._templates:
        for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
            if prefix + stacked_name in host_state:
                for number, part in zip(template.numbers, host_state[prefix + stacked_name], strict=True):
                    state_dict[f"{prefix}{number}.{name}"] = part.clone()


def _stack_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    for template in stack._templates:
        for name in template.names:
            keys = [f"{prefix}{number}.{name}" for number in template.numbers]
            if keys[-1] in state_dict:
                parts = [state_dict.pop(key) for key in keys]
                state_dict[keys[0]] = torch.stack(parts)
