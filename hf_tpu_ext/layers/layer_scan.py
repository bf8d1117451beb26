"""Layers that are alike as the turns of one loop: a program that does not grow with their number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import compress, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ..backends.base import Backend
from .activation_checkpointing import Dots
from .autocast import current_autocast, matmul_dtype
from .random_numbers import RandomNumbers
from .row_blocks import RowBlocks
from .static_cache import StaticKeyValueCache


# Bytes of parameters that are stacked or unstacked in one program. They are in memory twice until it has run.
_AT_ONCE = 2**28
# Elements of the smallest weight whose gradient goes to the chips part by part.
_LEAST_SCATTERED = 2**18


class _LayerLoop(torch.autograd.Function):
    """
    Runs stacked layers one after the other. The backward pass is a loop over them in reverse, which computes each layer anew
    from its input, and from its matrix products where they were kept. Each turn goes through blocks of rows.
    """

    @staticmethod
    def forward(
        ctx,
        layer: Callable,
        in_turn: Callable,
        keeps_dots: bool,
        blocks: RowBlocks,
        constants: Any,
        hidden: Tensor,
        *weights,
    ):
        ctx.layer, ctx.in_turn, ctx.blocks, ctx.keeps_dots = layer, in_turn, blocks, keeps_dots
        ctx.autocast = current_autocast(hidden.device.type)
        backend = blocks.backend
        leaves, ctx.constants = tree_flatten(constants)
        # No tensor, one for all rows, or one of which each row has its own part.
        ctx.kinds = [blocks.has_rows(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        # The loop would compute anew in each turn what it does not carry.
        ctx.plain, shared, own = (
            [leaf for leaf, kind in zip(leaves, ctx.kinds, strict=True) if kind is which]
            for which in (None, False, True)
        )
        assert not any(tensor.requires_grad for tensor in shared + own)

        def turn(carry: tuple, entries: tuple) -> tuple:
            hidden, shared, own = carry
            entries = in_turn(hidden, entries)

            def of_block(carry: tuple, entries: tuple) -> tuple:
                number, hidden, *own = entries
                shared, weights = carry
                with Dots() if keeps_dots else torch.no_grad() as dots:
                    output = layer(hidden, weights, _restore(ctx, shared, own), number)
                assert output.dtype == hidden.dtype
                return carry, (output, *(dots.results if keeps_dots else ()))

            _, (output, *kept) = blocks.loop(of_block, (shared, entries), (hidden, *own))
            return (output, shared, own), (hidden, *kept)

        with torch.no_grad():
            detached = tuple(weight.detach() for weight in weights)
            carry = (blocks.cut(hidden.detach()), tuple(shared), tuple(blocks.cut(tensor) for tensor in own))
            (output, *_), (inputs, *kept) = backend.loops.scan(turn, carry, detached)
        ctx.counts = (len(kept), len(shared), len(own))
        ctx.save_for_backward(inputs, *kept, *shared, *own, *weights)
        return blocks.join(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        inputs, *saved = ctx.saved_tensors
        saved = iter(saved)
        kept, shared, own = (tuple(islice(saved, count)) for count in ctx.counts)
        detached, num_kept = tuple(weight.detach() for weight in saved), len(kept)
        needed, blocks, backend = ctx.needs_input_grad[6:], ctx.blocks, ctx.blocks.backend

        def turn(carry: tuple, entries: tuple) -> tuple:
            gradient, shared, own = carry
            hidden, *entries = entries
            kept, entries = entries[:num_kept], entries[num_kept:]
            with ctx.autocast():
                weights = ctx.in_turn(hidden, entries)
            # What is made of them in a turn gets no gradient.
            is_needed = (*needed, *[False] * (len(weights) - len(needed)))
            trained = tuple(compress(weights, needed))

            def of_block(carry: tuple, entries: tuple) -> tuple:
                shared, weights, sums = carry
                number, gradient, hidden, *entries = entries
                kept, own = entries[:num_kept], entries[num_kept:]
                # On this thread: autograd's own holds on to its last tensors for a moment longer, and on XLA those of a
                # loop's body have no data.
                with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                    hidden = hidden.detach().requires_grad_()
                    weights = [
                        weight.detach().requires_grad_(needs) for weight, needs in zip(weights, is_needed, strict=True)
                    ]
                    with ctx.autocast(), Dots(kept) if ctx.keeps_dots else torch.enable_grad():
                        output = ctx.layer(hidden, weights, _restore(ctx, shared, own), number)
                    wanted = [hidden, *compress(weights, needed)]
                    gradient, *found = torch.autograd.grad(output, wanted, gradient)
                return (shared, carry[1], blocks.add(sums, found)), (gradient,)

            carry = (shared, weights, blocks.zeros(trained))
            (_, _, sums), (gradient,) = blocks.loop(of_block, carry, (gradient, hidden, *kept, *own))
            found = tuple(
                _summed(backend, total.to(weight.dtype)) for total, weight in zip(sums, trained, strict=True)
            )
            return (gradient, shared, own), found

        carry = (blocks.cut(gradient), shared, tuple(blocks.cut(tensor) for tensor in own))
        (hidden_grad, *_), found = backend.loops.scan(turn, carry, (inputs, *kept, *detached), reverse=True)
        found = iter(found)
        return *[None] * 5, blocks.join(hidden_grad), *(next(found) if is_needed else None for is_needed in needed)


def _summed(backend: Backend, gradient: Tensor) -> Tensor:
    """
    The gradient of a layer's weight. That of a small one is whole on every chip before it is split: one all-reduce takes all
    of them, where the partitioner would send the parts of each from chip to chip.
    """
    return backend.gather(gradient) if gradient.numel() < _LEAST_SCATTERED else gradient


def _restore(ctx, shared: Sequence[Tensor], own: Sequence[Tensor]) -> Any:
    parts = {None: iter(ctx.plain), False: iter(shared), True: iter(own)}
    return tree_unflatten([next(parts[kind]) for kind in ctx.kinds], ctx.constants)


class LayerStack(nn.ModuleList):
    """
    Stands in for the layers of a model, with one parameter for each name, of all layers: `(layers, ...)`. A host has as few
    tensors to handle as for one layer.

    Its state dict has the names and the tensors of the layers, and so can be saved and loaded. To the model it is a list of one
    layer, which runs them all.

    Args:
        layers ([`~torch.nn.ModuleList`]):
            Layers that are alike, see [`~hf_tpu_ext.layers.layer_list.why_layers_differ`]. They have no parameters while the stack is
            in use.
        backend ([`Backend`]):
            The backend in use.
        rematerialization (`str`):
            What the backward pass computes again: `"full"`, layers as turns of a loop; `"dots"`, the same but for matrix products
            with weights; `"none"`, nothing, and no loop either: the layers are unrolled.
        by_rows (`bool`, *optional*, defaults to `False`):
            Whether layers compute each row by itself, so that they can go through [`RowBlocks`].
        made_in_turn (`dict[str, tuple[Callable, Sequence[str]]]`, *optional*):
            What is made of frozen parameters at the begin of a layer's turn, once for all that computes with it: for the name of
            an attribute in a layer, a function of the input of the layer and of the parameters whose names are given.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        backend: Backend,
        rematerialization: str,
        by_rows: bool = False,
        made_in_turn: Mapping[str, tuple[Callable, Sequence[str]]] | None = None,
    ):
        super().__init__()
        self.add_module("0", layers[0])
        self._backend, self._rematerialization, self._by_rows = backend, rematerialization, by_rows
        # Only the first is part of the model meanwhile, and what its code reads is the same in all of them.
        self._layers = list(layers)
        self._names = [name for name, _ in layers[0].named_parameters()]
        self._made = made_in_turn or {}
        # Those of the layers by their name in a layer. They have no values while the stack is in use.
        self._parts: dict[str, list[nn.Parameter]] = {}
        #: The parameters by their name in a layer.
        self.stacked: dict[str, nn.Parameter] = {}
        self._checkpoints = False
        # What each layer reads in place of its parameters.
        self._read: list[Sequence[Tensor]] | None = None
        self.register_state_dict_post_hook(_split_state)
        self.register_load_state_dict_pre_hook(_stack_state)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: slice) -> list[Callable]:
        return [self._run]

    def __iter__(self) -> Iterator[Callable]:
        return iter([self._run])

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, as they were given."""
        return self._layers

    @property
    def _template(self) -> nn.Module:
        return self._modules["0"]

    def parts_of(self, parameter: nn.Parameter) -> list[nn.Parameter] | None:
        """The parameters of the layers that one is stacked of; `None` for another one."""
        return next((self._parts[name] for name, stacked in self.stacked.items() if stacked is parameter), None)

    def weights(self) -> Iterator[tuple[Tensor, nn.Linear | None]]:
        """What all layers compute with now, each with the module of the first one if it is the matrix of a linear layer."""
        for name in self._names:
            path, _, attribute = name.rpartition(".")
            module = self._template.get_submodule(path)
            is_linear = attribute == "weight" and isinstance(module, nn.Linear)
            yield _get(self._template, name), module if is_linear else None

    @contextmanager
    def reading(self, parts: Sequence[Tensor]) -> Iterator[None]:
        """Within this context, tokens after a prompt read parts of [`~LayerStack.weights`], those of one for all layers first."""
        self._read = [parts[index :: len(self)] for index in range(len(self))]
        try:
            yield
        finally:
            self._read = None

    @torch.no_grad()
    def stack(self) -> None:
        """Take the parameters of the layers. A second time, into the same parameters where their dtype is the same."""
        nothing, pending = self._nothing(), 0
        for name in self._names:
            self._parts[name] = parts = [layer.get_parameter(name) for layer in self._layers]
            whole, is_trained = torch.stack(parts), parts[0].requires_grad
            if name in self.stacked and self.stacked[name].dtype == whole.dtype:
                self.stacked[name].data = whole
                self.stacked[name].requires_grad_(is_trained)
            else:
                self.stacked[name] = nn.Parameter(whole, is_trained)
            for layer, part in zip(self._layers, parts, strict=True):
                part.data = nothing
                _put(layer, name, None)
            _put(self._template, name, self.stacked[name])
            pending = self._flushed(pending + whole.nbytes)
        self._backend.flush()
        # The loop computes the layer again by itself.
        self._checkpoints, self._template.gradient_checkpointing = self._template.gradient_checkpointing, False

    @torch.no_grad()
    def unstack(self) -> None:
        """Give the layers their parameters back: the same ones that they had, with the values of now."""
        self._template.gradient_checkpointing = self._checkpoints
        for layer in self._layers:
            layer.train(self._template.training)
        nothing, pending = self._nothing(), 0
        for name, parts in self._parts.items():
            stacked = self.stacked[name]
            for layer, part, value in zip(self._layers, parts, stacked.unbind(), strict=True):
                part.data = value.clone()
                part.requires_grad_(stacked.requires_grad)
                _put(layer, name, part)
            pending = self._flushed(pending + stacked.nbytes)
            stacked.data = nothing.to(stacked.dtype)
        self._backend.flush()

    def _flushed(self, pending: int) -> int:
        """Bytes that are still pending."""
        if pending <= _AT_ONCE:
            return pending
        self._backend.flush()
        return 0

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self._backend.device)

    def _run(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        # For a step, others may stand in their place.
        weights = [_get(self._template, name) for name in self._names]
        # By type: upstream has renamed the argument, in transformers 5.24, and a cache inside a loop crashes torch_xla.
        cache_name, cache = next(
            ((name, value) for name, value in kwargs.items() if isinstance(value, Cache)), ("", None)
        )
        if isinstance(cache, StaticKeyValueCache) and cache.index is None:
            return self._run_prompt(hidden, weights, cache_name, kwargs)
        if cache is not None or self._rematerialization == "none":
            # Of tokens after a prompt, each layer has its own place in the cache, which a loop would copy at every turn.
            layers = [self._template] * len(self) if cache is None else self._layers
            of_layers = self._read or zip(*(weight.unbind() for weight in weights), strict=True)
            for layer, parts in zip(layers, of_layers, strict=True):
                layer.train(self._template.training)
                hidden = functional_call(layer, dict(zip(self._names, parts, strict=True)), (hidden,), kwargs)
            return hidden
        if self._template.training:
            # For what draws random numbers in a turn, as dropout.
            weights.append(RandomNumbers.current(self._backend.device).seeds(len(self._layers)))
        blocks = RowBlocks(self._backend, *hidden.shape[:2], self._by_rows)
        call, keeps_dots = partial(self._call, blocks), self._rematerialization == "dots"
        return _LayerLoop.apply(call, self._in_turn, keeps_dots, blocks, kwargs, hidden, *weights)

    def _run_prompt(
        self, hidden: Tensor, weights: Sequence[Tensor], cache_name: str, kwargs: dict[str, Any]
    ) -> Tensor:
        """Run the layers on a prompt, whose keys and values go into the cache that is among `kwargs`."""
        cache = kwargs.pop(cache_name)
        # The loop would compute anew in each turn what it does not carry.
        leaves, form = tree_flatten(kwargs)
        is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]

        def turn(carry: tuple, entries: tuple) -> tuple[tuple, tuple]:
            hidden, shared = carry
            given = iter(shared)
            named = tree_unflatten(
                [next(given) if carried else leaf for leaf, carried in zip(leaves, is_tensor, strict=True)], form
            )
            of_layer = StaticKeyValueCache(self._backend, 1, cache.length)
            parts = dict(zip((*self._names, *self._made), self._in_turn(hidden, entries), strict=True))
            hidden = functional_call(self._template, parts, (hidden,), {**named, cache_name: of_layer})
            return (hidden, shared), of_layer.tensors

        carry = (hidden, tuple(compress(leaves, is_tensor)))
        (hidden, _), (keys, values) = self._backend.loops.scan(turn, carry, tuple(weights))
        cache.put([tensor for of_layer in zip(keys, values, strict=True) for tensor in of_layer])
        return hidden

    def _in_turn(self, hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a layer computes with: its weights whole, and where autocast is on, in another dtype than theirs."""
        dtype, backend = matmul_dtype(hidden), self._backend
        weights = (weight if weight.dtype == dtype else backend.loops.prevent_hoisting(weight) for weight in weights)
        # Left to the partitioner, a product goes through the parts of a weight one by one, and moves each by itself.
        weights = tuple(backend.gather(weight) for weight in weights)
        named = dict(zip(self._names, weights, strict=False))
        made = [make(hidden, *(named[name] for name in names)) for make, names in self._made.values()]
        if made:
            # The compiler would make them in every product anew.
            backend.separate(made)
        return *weights, *made

    def _call(
        self,
        blocks: RowBlocks,
        hidden: Tensor,
        weights: Sequence[Tensor],
        kwargs: dict[str, Any],
        number: Tensor | None,
    ) -> Tensor:
        weights, others = weights[: len(self._names)], weights[len(self._names) :]
        num_seeds = len(others) - len(self._made)
        seeds, made = others[:num_seeds], others[num_seeds:]
        if seeds:
            seed, chip = seeds[0].unbind()
            # To random numbers, a block is what a chip is: one of several with as many rows.
            seeds = (seed, blocks.number_over_chips(chip, number))
        with RandomNumbers(*seeds) if seeds else nullcontext():
            parts = dict(zip((*self._names, *self._made), (*weights, *made), strict=True))
            return functional_call(self._template, parts, (hidden,), kwargs)


def _get(layer: nn.Module, name: str) -> Tensor:
    module, _, attribute = name.rpartition(".")
    return layer.get_submodule(module)._parameters[attribute]


def _put(layer: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    module, _, attribute = name.rpartition(".")
    layer.get_submodule(module)._parameters[attribute] = parameter


def _split_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, _) -> None:
    own = {name: f"{prefix}0.{name}" for name in stack.stacked if f"{prefix}0.{name}" in state_dict}
    # On the host: on the device they would be there twice.
    fetched = stack._backend.fetch({name: state_dict.pop(key) for name, key in own.items()})
    for index in range(len(stack)):
        for name, tensor in fetched.items():
            state_dict[f"{prefix}{index}.{name}"] = tensor[index].clone()


def _stack_state(stack: LayerStack, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    for name in stack.stacked:
        keys = [f"{prefix}{index}.{name}" for index in range(len(stack))]
        if keys[-1] in state_dict:
            parts = [state_dict.pop(key) for key in keys]
            state_dict[keys[0]] = torch.stack(parts)
