"""The layers of one pattern as one loop, which runs when the model has called the last of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten
from transformers.cache_utils import Cache

from ..backends.base import Backend
from ..errors import UserError
from .activation_checkpointing import are_collected, collect_apart, give_to_model
from .autocast import matmul_dtype
from .layer_list import Pattern
from .layer_loop import Constants, LayerLoop, LayerRun, RowBlocks
from .random_numbers import RandomNumbers
from .static_cache import StaticKeyValueCache


#: For the name of an attribute in a layer, a function of the input of the layer and of the parameters whose names are given.
Derivations = Mapping[str, tuple[Callable, Sequence[str]]]


class Template:
    """
    The first of the layers that are the same and in the same run of each period, which computes for all of them. In place of each
    of its parameters and buffers it has all of theirs, stacked.

    Args:
        numbers (`list[int]`): The layers that it computes for.
        layer ([`~torch.nn.Module`]): The first of them.
        derivations (`Derivations`): Tensors that are computed from frozen parameters when a layer begins.
        plain (`Collection[torch.nn.Linear]`): As [`~hf_tpu_ext.layers.layer_scan.LayerStack`] takes it.
    """

    def __init__(self, numbers: list[int], layer: nn.Module, derivations: Derivations, plain: Collection[nn.Linear]):
        self.numbers, self.layer, self.derivations = numbers, layer, derivations
        #: Of its parameters, the weights of linear layers that are `plain`.
        self.plain = {f"{name}.weight" for name, module in layer.named_modules() if module in plain}
        buffers = layer.named_buffers(remove_duplicate=False)
        self.names = [name for name, _ in (*layer.named_parameters(), *buffers)]
        self.stacked_names = [f"{numbers[0]}.{name}" for name in self.names]
        # Whether it checkpoints by itself.
        self.checkpoints = False
        #: How many logits of routers are collected of each layer: none of those without experts.
        self.num_logits = 0

    def weights(self) -> list[Tensor]:
        """The stacked parameters and buffers, or what stands in their place."""
        return [tensors[name] for tensors, name in (place_of(self.layer, name) for name in self.names)]


class PatternLoop:
    """
    Runs the layers of a [`Pattern`] as a loop.

    Args:
        pattern ([`Pattern`]): How they repeat.
        templates (`list[Template]`): One for each run of the pattern.
        backend ([`Backend`]): The backend in use.
        keeps_dots (`bool`): Whether matrix products with weights are kept for the backward pass.
        by_rows (`bool`): Whether they can go through [`RowBlocks`].
    """

    def __init__(self, pattern: Pattern, templates: list[Template], backend: Backend, keeps_dots: bool, by_rows: bool):
        self.pattern, self.templates = pattern, templates
        self._backend, self._keeps_dots, self._by_rows = backend, keeps_dots, by_rows
        #: For each layer of the pattern, which template computes it, and with which part of the stacked parameters.
        self.places = {
            number: (template, index) for template in self.templates for index, number in enumerate(template.numbers)
        }
        # What the first layer of each run is to be called with, as long as the model has not called the last layer.
        self._calls: list[tuple[tuple, dict[str, Any]]] = []
        self._input: Tensor | None = None
        self._next = pattern.first

    def call_layer(
        self, number: int, hidden: Tensor, args: tuple, kwargs: dict[str, Any], prompt: StaticKeyValueCache | None
    ) -> Tensor:
        """
        Note the call of a layer, which returns its input. With the last of them, the loop runs. Of a `prompt`, keys and values go
        into its cache. What a model may do with one batch and not with another is refused: it was not seen when the loop was chosen.
        """
        template, index = self.places[number]
        problem = None
        if number != self._next:
            problem = f"the model calls layer {number} where layer {self._next} is the next"
        elif number > self.pattern.first and hidden is not self._input:
            problem = f"the model computes something between layers {number - 1} and {number}"
        elif index and not _are_same((args, kwargs), self._calls[self.templates.index(template)]):
            problem = f"layer {number} is called with something else than layer {template.numbers[0]}"
        if problem is not None:
            self._calls, self._input, self._next = [], None, self.pattern.first
            raise UserError(f"The layers do not run as a loop with this batch: {problem}. Set scan_layers='off'.")
        if index == 0:
            self._calls.append((args, kwargs))
        self._input, self._next = hidden, number + 1
        if self._next < self.pattern.end:
            return hidden
        calls, self._calls, self._input, self._next = self._calls, [], None, self.pattern.first
        return self._run(hidden, calls) if prompt is None else self._run_prompt(hidden, calls, prompt)

    def _run(self, hidden: Tensor, calls: Sequence[tuple[tuple, dict[str, Any]]]) -> Tensor:
        blocks = RowBlocks(self._backend, *hidden.shape[:2], self._by_rows)
        # For layers that draw random numbers, as dropout does.
        is_training = self.templates[0].layer.training
        num_periods, runs = self.pattern.num_periods, self.pattern.runs
        if is_training:
            seeds = RandomNumbers.current(self._backend.device).seeds(num_periods * self.pattern.period)
            seeds = seeds.unflatten(0, (num_periods, -1)).split(runs, 1)
        layers, weights, collects = [], [], are_collected()
        for place, (template, arguments) in enumerate(zip(self.templates, calls, strict=True)):
            # The loop computes the layer again by itself. A callback may have switched checkpointing off and on.
            template.layer.gradient_checkpointing = False
            # For a step, others may stand in their place.
            own = [*template.weights(), *([seeds[place].flatten(0, 1)] if is_training else [])]
            call = partial(self._call, template, blocks, collects)
            prepare = partial(self._prepare, template)
            layers.append(LayerRun(call, prepare, arguments, len(own), runs[place]))
            weights += own
        hidden, *logits = LayerLoop.apply(layers, self._keeps_dots, blocks, hidden, *weights)
        if logits:
            # The model has them of all layers, in their order.
            of_layers: dict[int, list[Tensor]] = {number: [] for number in self.places}
            stacked_logits = iter(logits)
            for template in self.templates:
                for stacked in islice(stacked_logits, template.num_logits):
                    for number, part in zip(template.numbers, stacked.unbind(), strict=True):
                        of_layers[number].append(part)
            give_to_model(chain.from_iterable(part for _, part in sorted(of_layers.items())))
        return hidden

    def _run_prompt(
        self, hidden: Tensor, calls: Sequence[tuple[tuple, dict[str, Any]]], cache: StaticKeyValueCache
    ) -> Tensor:
        constants = Constants(
            [
                (args, {name: value for name, value in kwargs.items() if not isinstance(value, Cache)})
                for args, kwargs in calls
            ]
        )
        shared, _ = constants.take_tensors()
        (cache_name,) = (name for name, value in calls[0][1].items() if value is cache)
        loops = self._backend.loops

        def run_period(carry: tuple, _) -> tuple[tuple, tuple]:
            rows, of_layers, weights = carry
            rows, states = list(rows), []
            for place, (template, stacked_weights) in enumerate(zip(self.templates, weights, strict=True)):

                def run_layer(carry: tuple, weights: tuple, template=template, place=place) -> tuple:
                    hidden, shared = carry
                    args, kwargs = constants.restore(place, shared)
                    # The layer knows its place in the model.
                    number = template.numbers[0]
                    layer_cache = StaticKeyValueCache(self._backend, number + 1, cache.length)
                    weights = self._prepare(template, hidden, weights)
                    parts = dict(zip((*template.names, *template.derivations), weights, strict=True))
                    hidden = functional_call(
                        template.layer, parts, (hidden, *args), {**kwargs, cache_name: layer_cache}
                    )
                    return (hidden, shared), (), layer_cache.tensors(number)

                of_layers, rows[place], _, keys_and_values = loops.scan_rows(
                    run_layer, of_layers, stacked_weights, rows[place], self.pattern.runs[place]
                )
                states += keys_and_values
            return (tuple(rows), of_layers, weights), tuple(states)

        zero = torch.zeros((), dtype=torch.int32, device=hidden.device)
        weights = tuple(tuple(template.weights()) for template in self.templates)
        carry = ((zero,) * len(weights), (hidden, tuple(shared)), weights)
        periods = torch.arange(self.pattern.num_periods, device=hidden.device)
        (_, (hidden, _), _), states = loops.scan(run_period, carry, (periods,))
        of_numbers = {}
        for template, keys, values in zip(self.templates, states[::2], states[1::2], strict=True):
            pairs = zip(keys.flatten(0, 1).unbind(), values.flatten(0, 1).unbind(), strict=True)
            of_numbers |= zip(template.numbers, pairs, strict=True)
        cache.put([tensor for _, pair in sorted(of_numbers.items()) for tensor in pair], self.pattern.first)
        return hidden

    def _prepare(self, template: Template, hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a layer computes with: its weights whole, and where autocast is on, in another dtype than theirs."""
        dtype, backend = matmul_dtype(hidden), self._backend
        weights = [weight if weight.dtype == dtype else backend.loops.prevent_hoisting(weight) for weight in weights]
        # Once, and not in each product: the gradients of all layers, which the backward pass has at once, have this dtype, too.
        weights[: len(template.names)] = [
            weight.to(dtype) if name in template.plain else weight
            for name, weight in zip(template.names, weights, strict=False)
        ]
        # Left to the partitioner, a product goes through the parts of a weight one by one, and moves each by itself.
        weights = tuple(backend.gather(weight) for weight in weights)
        weights_by_name = dict(zip(template.names, weights, strict=False))
        derived_tensors = [
            make(hidden, *(weights_by_name[name] for name in names)) for make, names in template.derivations.values()
        ]
        if derived_tensors:
            # The compiler would compute them in every product anew.
            derived_tensors = backend.separate(derived_tensors)
        return *weights, *derived_tensors

    def _call(
        self,
        template: Template,
        blocks: RowBlocks,
        collects: bool,
        hidden: Tensor,
        weights: Sequence[Tensor],
        arguments: tuple[tuple, dict[str, Any]],
        number: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, others = weights[: len(template.names)], weights[len(template.names) :]
        num_seeds = len(others) - len(template.derivations)
        seeds, derived_tensors = others[:num_seeds], others[num_seeds:]
        if seeds:
            seed, chip = seeds[0].unbind()
            # To random numbers, a block is what a chip is: one of several with as many rows.
            seeds = (seed, chip if number is None else chip * blocks.count + number)
        collector = collect_apart() if collects else nullcontext([])
        with RandomNumbers(*seeds) if seeds else nullcontext(), collector as logits:
            parts = dict(zip((*template.names, *template.derivations), (*weights, *derived_tensors), strict=True))
            args, kwargs = arguments
            hidden = functional_call(template.layer, parts, (hidden, *args), kwargs)
        template.num_logits = len(logits)
        return hidden, *logits


def place_of(layer: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Where a layer has a parameter or a buffer: the dictionary of its module, and the name in it."""
    path, _, attribute = name.rpartition(".")
    module = layer.get_submodule(path)
    return (module._parameters if attribute in module._parameters else module._buffers), attribute


def _are_same(*arguments: Any) -> bool:
    """Whether arguments are the same tensors, and else equal."""
    (leaves, structure), (others, structure_of_others) = map(tree_flatten, arguments)
    return structure == structure_of_others and all(
        leaf is other or not (isinstance(leaf, Tensor) or isinstance(other, Tensor)) and leaf == other
        for leaf, other in zip(leaves, others, strict=True)
    )
