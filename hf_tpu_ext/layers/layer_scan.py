"""Layers that repeat as the turns of one loop: a program that does not grow with their number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ..backends.base import Backend
from ..errors import UserError
from .autocast import matmul_dtype
from .layer_list import CalledLayers, Pattern
from .layer_loop import LayerLoop, LoopedLayer
from .random_numbers import RandomNumbers
from .row_blocks import RowBlocks
from .static_cache import StaticKeyValueCache


# Bytes of parameters that are stacked or unstacked in one program. They are in memory twice until it has run.
_AT_ONCE = 2**28

#: For the name of an attribute in a layer, a function of the input of the layer and of the parameters whose names are given.
MadeInTurn = Mapping[str, tuple[Callable, Sequence[str]]]


class LayerStack(CalledLayers):
    """
    Stands in for the layers of a model. Those of a [`Pattern`] are the turns of a loop; the rest runs as before. Of the layers in
    the same place of a period, there is one parameter for each name: `(turns, ...)`. A host has as few tensors to handle as for one
    period.

    Its state dict has the names and the tensors of the layers, and so can be saved and loaded. The model calls the layers one by
    one: the loop runs when it calls the last of them.

    Args:
        layers ([`~torch.nn.ModuleList`]):
            The layers. Those of the pattern have no parameters while the stack is in use.
        backend ([`Backend`]):
            The backend in use.
        rematerialization (`str`):
            What the backward pass computes again: `"full"`, layers as turns of a loop; `"dots"`, the same but for matrix products
            with weights; `"none"`, nothing, and no loop either: the layers are unrolled.
        by_rows (`bool`, *optional*, defaults to `False`):
            Whether layers compute each row by itself, so that they can go through [`RowBlocks`].
        pattern ([`Pattern`], *optional*):
            How they repeat, see [`~hf_tpu_ext.layers.layer_list.find_pattern`]. Default: all of them are the same.
        made_in_turn (`Callable[[nn.Module], MadeInTurn]`, *optional*):
            Says what of a layer is made of frozen parameters when its turn begins, once for all that computes with it.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        backend: Backend,
        rematerialization: str,
        by_rows: bool = False,
        pattern: Pattern | None = None,
        made_in_turn: Callable[[nn.Module], MadeInTurn] = lambda layer: {},
    ):
        super().__init__(layers)
        #: How the layers repeat.
        self.pattern = Pattern(0, 1, len(layers)) if pattern is None else pattern
        self._backend, self._rematerialization, self._by_rows = backend, rematerialization, by_rows
        self._templates = [
            _Template(number, self._layers[number], made_in_turn(self._layers[number]))
            for number in range(self.pattern.first, self.pattern.first + self.pattern.period)
        ]
        # The others of the pattern are no part of the model meanwhile, and what its code reads is the same in the first of them.
        for number, layer in enumerate(self._layers):
            if number < self.pattern.first + self.pattern.period or number >= self.pattern.end:
                self.add_module(str(number), layer)
        # Those of the layers by the name of the stacked one. They have no values while the stack is in use.
        self._parts: dict[str, list[nn.Parameter]] = {}
        #: The parameters by their names in the stack.
        self.stacked: dict[str, nn.Parameter] = {}
        # What each layer reads in place of its parameters.
        self._read: Sequence[Tensor] | None = None
        # For the layers of the pattern, when the model has called the first of them: what they read where they are unrolled, or
        # what they are to be called with in the loop.
        self._unrolled: Sequence[Sequence[Tensor]] = ()
        self._called: list[tuple[tuple, dict[str, Any]]] = []
        self._input: Tensor | None = None
        self._next = self.pattern.first
        self.register_state_dict_post_hook(_split_state)
        self.register_load_state_dict_pre_hook(_stack_state)

    def parts_of(self, parameter: nn.Parameter) -> list[nn.Parameter] | None:
        """The parameters of the layers that one is stacked of; `None` for another one."""
        return next((self._parts[name] for name, stacked in self.stacked.items() if stacked is parameter), None)

    def looped_modules(self) -> Iterator[nn.Module]:
        """The modules whose parameters are stacked."""
        for template in self._templates:
            yield from template.layer.modules()

    def weights(self) -> Iterator[tuple[Tensor, nn.Linear | None]]:
        """What the layers of the pattern compute with now, each with its module if it is the matrix of a linear layer."""
        for template in self._templates:
            for name, weight in zip(template.names, template.weights(), strict=True):
                path, _, attribute = name.rpartition(".")
                module = template.layer.get_submodule(path)
                is_linear = attribute == "weight" and isinstance(module, nn.Linear)
                yield weight, module if is_linear else None

    @contextmanager
    def reading(self, parts: Sequence[Tensor]) -> Iterator[None]:
        """Within this context, tokens after a prompt read parts of [`~LayerStack.weights`], those of one for all turns first."""
        self._read = parts
        try:
            yield
        finally:
            self._read = None

    # ---- Parameters ----

    @torch.no_grad()
    def stack(self) -> None:
        """Take the parameters of the layers. A second time, into the same parameters where their dtype is the same."""
        nothing, pending = self._nothing(), 0
        for template in self._templates:
            layers = self._layers_like(template)
            for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
                self._parts[stacked_name] = parts = [layer.get_parameter(name) for layer in layers]
                whole, is_trained = torch.stack(parts), parts[0].requires_grad
                if stacked_name in self.stacked and self.stacked[stacked_name].dtype == whole.dtype:
                    self.stacked[stacked_name].data = whole
                    self.stacked[stacked_name].requires_grad_(is_trained)
                else:
                    self.stacked[stacked_name] = nn.Parameter(whole, is_trained)
                for layer, part in zip(layers, parts, strict=True):
                    part.data = nothing
                    _put(layer, name, None)
                _put(template.layer, name, self.stacked[stacked_name])
                pending = self._flushed(pending + whole.nbytes)
            # The loop computes the layer again by itself.
            template.checkpoints = template.layer.gradient_checkpointing
            template.layer.gradient_checkpointing = False
        self._backend.flush()

    @torch.no_grad()
    def unstack(self) -> None:
        """Give the layers their parameters back: the same ones that they had, with the values of now."""
        nothing, pending = self._nothing(), 0
        for template in self._templates:
            template.layer.gradient_checkpointing = template.checkpoints
            layers = self._layers_like(template)
            for layer in layers:
                layer.train(template.layer.training)
            for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
                stacked, parts = self.stacked[stacked_name], self._parts[stacked_name]
                for layer, part, value in zip(layers, parts, stacked.unbind(), strict=True):
                    part.data = value.clone()
                    part.requires_grad_(stacked.requires_grad)
                    _put(layer, name, part)
                pending = self._flushed(pending + stacked.nbytes)
                stacked.data = nothing.to(stacked.dtype)
        self._backend.flush()

    def _layers_like(self, template: "_Template") -> list[nn.Module]:
        return self._layers[template.number : self.pattern.end : self.pattern.period]

    def _flushed(self, pending: int) -> int:
        """Bytes that are still pending."""
        if pending <= _AT_ONCE:
            return pending
        self._backend.flush()
        return 0

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self._backend.device)

    # ---- Calls ----

    def call_layer(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """
        Run a layer of the rest, or one that is unrolled. One of the loop is noted, and the loop runs with the last of them; until
        then, a layer returns its input.
        """
        pattern = self.pattern
        if not pattern.first <= number < pattern.end:
            return self._layers[number](hidden, *args, **kwargs)
        # By type: upstream has renamed the argument, in transformers 5.24, and a cache inside a loop crashes torch_xla.
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        is_prompt = isinstance(cache, StaticKeyValueCache) and cache.index is None
        if not is_prompt and (cache is not None or self._rematerialization == "none"):
            # Of tokens after a prompt, each layer has its own place in the cache, which a loop would copy at every turn.
            return self._call_unrolled(number, hidden, args, kwargs, has_cache=cache is not None)
        self._check_call(number, hidden, args, kwargs)
        if number < pattern.first + pattern.period:
            self._called.append((args, kwargs))
        self._input, self._next = hidden, number + 1
        if self._next < pattern.end:
            return hidden
        called, self._called, self._input, self._next = self._called, [], None, pattern.first
        return self._run_prompt(hidden, called, cache) if is_prompt else self._run(hidden, called)

    def _check_call(self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse what a model may do with one batch and not with another: it was not seen when the loop was chosen."""
        first, period = self.pattern.first, self.pattern.period
        earlier = first + (number - first) % period
        found = None
        if number != self._next:
            found = f"the model calls layer {number} where layer {self._next} is the next"
        elif number > first and hidden is not self._input:
            found = f"the model computes something between layers {number - 1} and {number}"
        elif number >= first + period and not _are_same((args, kwargs), self._called[earlier - first]):
            found = f"layer {number} is called with something else than layer {earlier}"
        if found is not None:
            self._called, self._input, self._next = [], None, first
            raise UserError(f"The layers do not run as a loop with this batch: {found}. Set scan_layers='off'.")

    def _call_unrolled(
        self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any], has_cache: bool
    ) -> Tensor:
        place = number - self.pattern.first
        turn, kind = divmod(place, self.pattern.period)
        if place == 0:
            # Once for all: the gradient of each part by itself would be as large as the whole.
            self._unrolled = [[weight.unbind() for weight in template.weights()] for template in self._templates]
            if self._read is not None:
                self._unrolled = self._copies()
        template = self._templates[kind]
        layer = self._layers[number] if has_cache else template.layer
        layer.train(template.layer.training)
        parts = {name: of_turns[turn] for name, of_turns in zip(template.names, self._unrolled[kind], strict=True)}
        if number == self.pattern.end - 1:
            self._unrolled = ()
        return functional_call(layer, parts, (hidden, *args), kwargs)

    def _copies(self) -> list[list[Sequence[Tensor]]]:
        """What is read in place of the parameters, in the order of these."""
        rest, found = list(self._read), []
        for template in self._templates:
            of_names = []
            for _ in template.names:
                of_names.append(rest[: self.pattern.turns])
                rest = rest[self.pattern.turns :]
            found.append(of_names)
        return found

    def _run(self, hidden: Tensor, called: Sequence[tuple[tuple, dict[str, Any]]]) -> Tensor:
        blocks = RowBlocks(self._backend, *hidden.shape[:2], self._by_rows)
        # For what draws random numbers in a turn, as dropout.
        is_training = self._templates[0].layer.training
        turns, period = self.pattern.turns, self.pattern.period
        seeds = ()
        if is_training:
            seeds = RandomNumbers.current(self._backend.device).seeds(turns * period)
        layers, weights = [], []
        for place, (template, arguments) in enumerate(zip(self._templates, called, strict=True)):
            # The loop computes the layer again by itself. A callback may have switched checkpointing off and on.
            template.layer.gradient_checkpointing = False
            # For a step, others may stand in their place.
            own = [*template.weights(), *([seeds[place::period]] if is_training else [])]
            call, in_turn = partial(self._call, template, blocks), partial(self._in_turn, template)
            layers.append(LoopedLayer(call, in_turn, arguments, len(own)))
            weights += own
        return LayerLoop.apply(layers, self._rematerialization == "dots", blocks, hidden, *weights)

    def _run_prompt(
        self, hidden: Tensor, called: Sequence[tuple[tuple, dict[str, Any]]], cache: StaticKeyValueCache
    ) -> Tensor:
        """Run the layers on a prompt, whose keys and values go into the `cache` that they are called with."""
        # The loop would compute anew in each turn what it does not carry.
        leaves, structure = tree_flatten([(args, _without_cache(kwargs)) for args, kwargs in called])
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        (cache_name,) = (name for name, value in called[0][1].items() if value is cache)
        num_layers = self.pattern.first + self.pattern.period

        def turn(carry: tuple, entries: tuple) -> tuple[tuple, tuple]:
            hidden, shared = carry
            given, entries = iter(shared), iter(entries)
            arguments = tree_unflatten(
                [next(given) if carried else leaf for leaf, carried in zip(leaves, is_tensor, strict=True)], structure
            )
            # The layers know their place in the model.
            of_turn = StaticKeyValueCache(self._backend, num_layers, cache.length)
            for template, (args, kwargs) in zip(self._templates, arguments, strict=True):
                weights = self._in_turn(template, hidden, [next(entries) for _ in template.names])
                parts = dict(zip((*template.names, *template.made), weights, strict=True))
                hidden = functional_call(template.layer, parts, (hidden, *args), {**kwargs, cache_name: of_turn})
            return (hidden, shared), of_turn.tensors_from(self.pattern.first)

        weights = tuple(weight for template in self._templates for weight in template.weights())
        (hidden, _), states = self._backend.loops.scan(turn, (hidden, tuple(compress(leaves, is_tensor))), weights)
        of_layers = zip(*(tensor.unbind() for tensor in states), strict=True)
        cache.put([tensor for of_turn in of_layers for tensor in of_turn], self.pattern.first)
        return hidden

    def _in_turn(self, template: "_Template", hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a layer computes with: its weights whole, and where autocast is on, in another dtype than theirs."""
        dtype, backend = matmul_dtype(hidden), self._backend
        weights = (weight if weight.dtype == dtype else backend.loops.prevent_hoisting(weight) for weight in weights)
        # Left to the partitioner, a product goes through the parts of a weight one by one, and moves each by itself.
        weights = tuple(backend.gather(weight) for weight in weights)
        named = dict(zip(template.names, weights, strict=False))
        made = [make(hidden, *(named[name] for name in names)) for make, names in template.made.values()]
        if made:
            # The compiler would make them in every product anew.
            backend.separate(made)
        return *weights, *made

    def _call(
        self,
        template: "_Template",
        blocks: RowBlocks,
        hidden: Tensor,
        weights: Sequence[Tensor],
        arguments: tuple[tuple, dict[str, Any]],
        number: Tensor | None,
    ) -> Tensor:
        weights, others = weights[: len(template.names)], weights[len(template.names) :]
        num_seeds = len(others) - len(template.made)
        seeds, made = others[:num_seeds], others[num_seeds:]
        if seeds:
            seed, chip = seeds[0].unbind()
            # To random numbers, a block is what a chip is: one of several with as many rows.
            seeds = (seed, blocks.number_over_chips(chip, number))
        with RandomNumbers(*seeds) if seeds else nullcontext():
            parts = dict(zip((*template.names, *template.made), (*weights, *made), strict=True))
            args, kwargs = arguments
            return functional_call(template.layer, parts, (hidden, *args), kwargs)


class _Template:
    """The first of the layers that are in one place of a period, which computes for all of them."""

    def __init__(self, number: int, layer: nn.Module, made: MadeInTurn):
        self.number, self.layer, self.made = number, layer, made
        self.names = [name for name, _ in layer.named_parameters()]
        self.stacked_names = [f"{number}.{name}" for name in self.names]
        # Whether it checkpoints by itself.
        self.checkpoints = False

    def weights(self) -> list[Tensor]:
        """The stacked parameters, or what stands in their place."""
        return [_get(self.layer, name) for name in self.names]


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}


def _are_same(*arguments: Any) -> bool:
    """Whether arguments are the same tensors, and else equal."""
    (leaves, structure), (others, structure_of_others) = map(tree_flatten, arguments)
    return structure == structure_of_others and all(
        leaf is other or not (isinstance(leaf, Tensor) or isinstance(other, Tensor)) and leaf == other
        for leaf, other in zip(leaves, others, strict=True)
    )


def _get(layer: nn.Module, name: str) -> Tensor:
    module, _, attribute = name.rpartition(".")
    return layer.get_submodule(module)._parameters[attribute]


def _put(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    module, _, attribute = name.rpartition(".")
    layer.get_submodule(module)._parameters[attribute] = parameter


def _names_of_layers(stack: LayerStack, template: _Template, name: str) -> list[str]:
    """The names of a parameter in the layers of a place in the period."""
    return [f"{number}.{name}" for number in range(template.number, stack.pattern.end, stack.pattern.period)]


def _split_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, _) -> None:
    stacked = [prefix + name for name in stack.stacked if prefix + name in state_dict]
    # On the host: on the device they would be there twice.
    fetched = stack._backend.fetch({key: state_dict.pop(key) for key in stacked})
    for template in stack._templates:
        for name, stacked_name in zip(template.names, template.stacked_names, strict=True):
            if prefix + stacked_name in fetched:
                for of_layer, part in zip(
                    _names_of_layers(stack, template, name), fetched[prefix + stacked_name], strict=True
                ):
                    state_dict[prefix + of_layer] = part.clone()


def _stack_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    for template in stack._templates:
        for name in template.names:
            keys = [prefix + of_layer for of_layer in _names_of_layers(stack, template, name)]
            if keys[-1] in state_dict:
                parts = [state_dict.pop(key) for key in keys]
                state_dict[keys[0]] = torch.stack(parts)
