"""A loop over layers inside a program, each iteration of which is one period of the pattern in which they repeat."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backends.base import Backend
from .activation_checkpointing import Dots
from .autocast import current_autocast


# Tokens of a block at most, where rows are not longer: the compiler for TPU writes activations of more to HBM, and reads them
# again. With less than a quarter, products are small, and weights read often.
_BLOCK_TOKENS = 4096


class RowBlocks:
    """
    How a batch of so many rows, each of which is in one block, is cut into blocks, and the loop over them. With one
    block nothing is cut, and there is no loop: so it is unless `is_enabled`, and where the partitioner splits rows
    over chips, since those of a block would be on some of the chips.
    """

    def __init__(self, backend: Backend, rows: int, length: int, is_enabled: bool = True):
        self.backend, self._rows = backend, rows
        has_own_rows = backend.num_chips == 1 or backend.manual_sharding.active
        #: How many blocks there are, of the same number of rows.
        self.count = 1
        if is_enabled and has_own_rows:
            most = max(_BLOCK_TOKENS, length)
            sizes = (size for size in range(rows, 0, -1) if rows % size == 0)
            # Where none is good, as with many short rows that are a prime number, there is one block.
            self.count = rows // next((size for size in sizes if most // 4 <= size * length <= most), rows)

    def cut(self, tensor: Tensor) -> Tensor:
        """From `(rows, ...)` to `(blocks, rows of a block, ...)`."""
        return tensor if self.count == 1 else tensor.unflatten(0, (self.count, -1))

    def join(self, tensor: Tensor) -> Tensor:
        """What [`~RowBlocks.cut`] has cut."""
        return tensor if self.count == 1 else tensor.flatten(0, 1)

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether each row of the batch has its own part of a tensor; others, as positions, may be for all rows."""
        return tensor.ndim > 1 and len(tensor) == self._rows

    def zeros(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What sums over blocks begin with, for results of the shapes of `tensors`: none if there is one block."""
        if self.count == 1:
            return ()
        return tuple(torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in tensors)

    def add(self, sums: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums with what was found for a block."""
        if self.count == 1:
            return tuple(parts)
        return tuple(total + part for total, part in zip(sums, parts, strict=True))

    def loop(self, body: Callable, carry: tuple, entries: tuple) -> tuple:
        """
        Call `body(carry, (number, *entries))` for each block, with what the last one carried on, as [`Loops.scan`] does.
        The number is `None` if there is one block.
        """
        if self.count == 1:
            return body(carry, (None, *entries))
        numbers = torch.arange(self.count, dtype=torch.int32, device=self.backend.device)
        return self.backend.loops.scan(body, carry, (numbers, *entries))


# Elements of the smallest weight whose gradient goes to the chips part by part.
_LEAST_SCATTERED = 2**18


class LayerRun(NamedTuple):
    """
    Layers of a period that follow one another and compute the same, a loop themselves.

    Args:
        call (`Callable`):
            Called as `call(hidden, weights, arguments, number)`, with what `prepare` returned and the number of the block of rows.
            Returns hidden states, and what of a layer the model collects besides: of each row its own part.
        prepare (`Callable`):
            Called as `prepare(hidden, weights)` at the begin of each layer. Returns the weights that it computes with.
        arguments (`Any`): What they are called with besides, the same in each period.
        num_weights (`int`): How many of the stacked tensors are their own.
        count (`int`): How many there are in a period.
    """

    call: Callable
    prepare: Callable
    arguments: Any
    num_weights: int
    count: int


class LayerLoop(torch.autograd.Function):
    """
    Runs the layers of a period one after the other, and period after period. Stacked tensors are `(layers of all periods, ...)`. The backward
    pass is a loop over them in reverse, which computes each layer anew from its input, and from its matrix products where they
    were kept. Each layer goes through blocks of rows. Returned are hidden states, and what is collected of the layers of each run:
    `(layers of all periods, ...)`.
    """

    @staticmethod
    def forward(
        ctx, layers: Sequence[LayerRun], keeps_dots: bool, blocks: RowBlocks, hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layers, ctx.blocks, ctx.keeps_dots = layers, blocks, keeps_dots
        ctx.autocast = current_autocast(hidden.device.type)
        loops = blocks.backend.loops
        ctx.constants = Constants([layer.arguments for layer in layers], blocks.has_rows)
        shared, own = ctx.constants.take_tensors()
        ctx.num_dots, ctx.num_collected = [0] * len(layers), [0] * len(layers)
        # Of each run, the dtypes of the weights that its layers compute with.
        ctx.dtypes = [()] * len(layers)

        def run_period(carry: tuple, _) -> tuple:
            rows, hidden, weights = carry
            rows, results = list(rows), []
            for place, (layer, stacked_weights) in enumerate(zip(layers, _split(layers, weights), strict=True)):

                def run_layer(carry: tuple, weights: tuple, layer=layer, place=place) -> tuple:
                    hidden, shared, own = carry
                    layer_weights = layer.prepare(hidden, weights)
                    ctx.dtypes[place] = [tensor.dtype for tensor in layer_weights]

                    def run_block(carry: tuple, entries: tuple) -> tuple:
                        number, hidden, *own = entries
                        shared, weights = carry
                        with Dots() if keeps_dots else torch.no_grad() as dots:
                            arguments = ctx.constants.restore(place, shared, own)
                            output, *logits = layer.call(hidden, weights, arguments, number)
                        assert output.dtype == hidden.dtype
                        ctx.num_collected[place] = len(logits)
                        return carry, (output, *logits, *(dots.results if keeps_dots else ()))

                    _, (output, *results) = blocks.loop(run_block, (shared, layer_weights), (hidden, *own))
                    logits, dots_of_block = _cut(results, (ctx.num_collected[place], len(results)))
                    ctx.num_dots[place] = len(dots_of_block)
                    return (output, shared, own), (), (hidden, *dots_of_block, *map(blocks.join, logits))

                hidden, rows[place], _, of_layers = loops.scan_rows(
                    run_layer, hidden, stacked_weights, rows[place], layer.count
                )
                results += of_layers
            return (tuple(rows), hidden, weights), tuple(results)

        with torch.no_grad():
            weights_only = tuple(weight.detach() for weight in weights)
            carry = (blocks.cut(hidden.detach()), tuple(shared), tuple(blocks.cut(tensor) for tensor in own))
            zero = torch.zeros((), dtype=torch.int32, device=hidden.device)
            periods = _period_numbers(layers, weights)
            (_, (output, *_), _), results = loops.scan(
                run_period, ((zero,) * len(layers), carry, weights_only), (periods,)
            )
            results = (tensor.flatten(0, 1) for tensor in results)
        # Of each run, what its layers are computed anew from, and then what is collected of them.
        counts = chain.from_iterable(zip((1 + count for count in ctx.num_dots), ctx.num_collected, strict=True))
        of_runs = list(_cut(results, counts))
        inputs, logits = (list(chain.from_iterable(of_runs[first::2])) for first in (0, 1))
        ctx.counts = (len(inputs), len(shared), len(own))
        ctx.save_for_backward(*inputs, *shared, *own, *weights)
        return blocks.join(output), *logits

    @staticmethod
    def backward(ctx, gradient: Tensor, *of_collected: Tensor) -> tuple:
        layers, saved_tensors = ctx.layers, iter(ctx.saved_tensors)
        inputs, shared, own = (tuple(islice(saved_tensors, count)) for count in ctx.counts)
        weights = tuple(weight.detach() for weight in saved_tensors)
        needs_grad, blocks, backend = ctx.needs_input_grad[4:], ctx.blocks, ctx.blocks.backend
        needed_of = list(_split(layers, needs_grad))
        # Of each run of layers, what they are computed anew from, and the gradients of what was collected of them.
        num_inputs = [1 + count for count in ctx.num_dots]
        pairs = zip(_cut(inputs, num_inputs), _cut(of_collected, ctx.num_collected), strict=True)
        inputs = tuple(chain.from_iterable(chain.from_iterable(pairs)))
        num_entries = [sum(counts) for counts in zip(num_inputs, ctx.num_collected, strict=True)]
        # What only chooses, as an indexer of attention, gets no gradient, and no optimizer may decay it.
        used: list[list[bool]] = [[]] * len(layers)

        def differentiate_period(carry: tuple, _) -> tuple:
            rows, gradient, inputs, weights, weight_grads = carry
            rows, weight_grads = list(rows), list(weight_grads)
            inputs_of, weights_of = _cut(inputs, num_entries), _split(layers, weights)
            stacked_of = [(*tensors, *own) for tensors, own in zip(inputs_of, weights_of, strict=True)]
            for place in reversed(range(len(layers))):

                def differentiate_layer(carry: tuple, entries: tuple, layer=layers[place], place=place) -> tuple:
                    gradient, shared, own = carry
                    needs_grad, num_dots = needed_of[place], ctx.num_dots[place]
                    tensors, weights = [gradient, *entries[: num_entries[place]]], entries[num_entries[place] :]
                    if len(layers) > 1:
                        # Several layers of one period would be computed anew at once, and all of that kept.
                        tensors = backend.separate(tensors)
                    gradient, hidden, *entries = tensors
                    dots, of_collected = entries[:num_dots], map(blocks.cut, entries[num_dots:])
                    gradients_of = [gradient, *of_collected]
                    with ctx.autocast():
                        layer_weights = layer.prepare(hidden, weights)
                    # Tensors that `prepare` derives from them get no gradient.
                    is_needed = (*needs_grad, *[False] * (len(layer_weights) - len(needs_grad)))
                    trained_weights = tuple(compress(layer_weights, needs_grad))

                    def differentiate_block(carry: tuple, entries: tuple) -> tuple:
                        shared, weights, sums = carry
                        number, hidden, *entries = entries
                        dots, gradients, own = _cut(entries, (num_dots, len(gradients_of), len(entries)))
                        # On this thread: autograd's own holds on to its last tensors for a moment longer, and on XLA those of
                        # a loop's body have no data.
                        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                            hidden = hidden.detach().requires_grad_()
                            weights = [
                                weight.detach().requires_grad_(needs)
                                for weight, needs in zip(weights, is_needed, strict=True)
                            ]
                            with ctx.autocast(), Dots(dots) if ctx.keeps_dots else torch.enable_grad():
                                arguments = ctx.constants.restore(place, shared, own)
                                outputs = layer.call(hidden, weights, arguments, number)
                            leaves = [hidden, *compress(weights, needs_grad)]
                            pairs = zip(outputs, gradients, strict=True)
                            outputs, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
                            gradient, *grads = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
                        used[place] = [tensor is not None for tensor in grads]
                        grads = [
                            torch.zeros_like(weight) if tensor is None else tensor
                            for weight, tensor in zip(leaves[1:], grads, strict=True)
                        ]
                        return (shared, carry[1], blocks.add(sums, grads)), (gradient,)

                    carry = (shared, layer_weights, blocks.zeros(trained_weights))
                    (_, _, sums), (gradient,) = blocks.loop(
                        differentiate_block, carry, (hidden, *dots, *gradients_of, *own)
                    )
                    weight_grads = (
                        total.to(weight.dtype) for total, weight in zip(sums, trained_weights, strict=True)
                    )
                    # That of a small weight is whole on every chip before it is split: one all-reduce takes all of them, where the
                    # partitioner would send the parts of each from chip to chip.
                    weight_grads = (
                        backend.gather(gradient) if gradient.numel() < _LEAST_SCATTERED else gradient
                        for gradient in weight_grads
                    )
                    return (gradient, shared, own), tuple(weight_grads), ()

                gradient, rows[place], weight_grads[place], _ = backend.loops.scan_rows(
                    differentiate_layer,
                    gradient,
                    stacked_of[place],
                    rows[place],
                    layers[place].count,
                    weight_grads[place],
                    reverse=True,
                )
            return (tuple(rows), gradient, inputs, weights, tuple(weight_grads)), ()

        carry = (blocks.cut(gradient), shared, tuple(blocks.cut(tensor) for tensor in own))
        periods = _period_numbers(layers, weights)
        last = tuple(
            torch.arange(layer.count * len(periods), dtype=torch.int32, device=gradient.device)[-1] for layer in layers
        )
        weight_grads = tuple(
            tuple(
                torch.zeros_like(weight, dtype=dtype)
                for weight, dtype in compress(zip(own, dtypes, strict=False), needs_grad)
            )
            for own, dtypes, needs_grad in zip(_split(layers, weights), ctx.dtypes, needed_of, strict=True)
        )
        (_, (hidden_grad, *_), *_, weight_grads), _ = backend.loops.scan(
            differentiate_period, (last, carry, inputs, weights, weight_grads), (periods,)
        )
        pairs = zip(chain.from_iterable(weight_grads), chain.from_iterable(used), strict=True)
        gradients = (gradient if is_used else None for gradient, is_used in pairs)
        return (
            *[None] * 3,
            blocks.join(hidden_grad),
            *(next(gradients) if is_needed else None for is_needed in needs_grad),
        )


def _period_numbers(layers: Sequence[LayerRun], weights: Sequence[Tensor]) -> Tensor:
    """The numbers of the periods, over which the loop goes."""
    return torch.arange(len(weights[0]) // layers[0].count, device=weights[0].device)


def _split(layers: Sequence[LayerRun], entries: Sequence) -> Iterable[tuple]:
    return _cut(entries, (layer.num_weights for layer in layers))


def _cut(entries: Iterable, counts: Iterable[int]) -> Iterable[tuple]:
    entries = iter(entries)
    return (tuple(islice(entries, count)) for count in counts)


class _Place(NamedTuple):
    """Where a tensor is that layers are called with."""

    has_rows: bool
    number: int
    dtype: torch.dtype


class Constants:
    """
    What the layers of a period are called with, tensors by themselves: each iteration would compute anew what a loop does not carry.
    `has_rows` says of which each row of the batch has its own part.
    """

    def __init__(self, arguments: Sequence[Any], has_rows: Callable[[Tensor], bool] = lambda tensor: False):
        # By whether each row of the batch has its own part. Each once, although several layers are called with it.
        self._tensors: dict[bool, list[Tensor]] = {False: [], True: []}
        places: dict[int, _Place] = {}
        self._arguments = []
        for of_layer in arguments:
            leaves, structure = tree_flatten(of_layer)
            for leaf in leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in places:
                    assert not leaf.requires_grad
                    tensors = self._tensors[by_row := has_rows(leaf)]
                    places[id(leaf)] = _Place(by_row, len(tensors), leaf.dtype)
                    # In a loop of torch_xla, those of bool become int64.
                    tensors.append(leaf.to(torch.uint8) if leaf.dtype == torch.bool else leaf)
            self._arguments.append(([places.get(id(leaf), leaf) for leaf in leaves], structure))

    def take_tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that are for all rows, and those of which each row has its own part. They are not kept here any more."""
        shared, own = self._tensors[False], self._tensors[True]
        self._tensors = {}
        return shared, own

    def restore(self, layer: int, shared: Sequence[Tensor], own: Sequence[Tensor] = ()) -> Any:
        """The arguments of a layer, with these tensors in place of the first ones."""
        leaves, structure = self._arguments[layer]
        tensors = [
            (own if leaf.has_rows else shared)[leaf.number].to(leaf.dtype) if isinstance(leaf, _Place) else leaf
            for leaf in leaves
        ]
        return tree_unflatten(tensors, structure)
