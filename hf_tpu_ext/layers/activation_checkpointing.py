"""Activation checkpointing: what of a layer the forward pass keeps for the backward pass, and what is computed again."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.utils import output_capturing

from ..backends.base import Backend
from ..temporarily import temporarily
from .autocast import current_autocast
from .random_numbers import RandomNumbers


# Products with weights. Those of attention, `bmm`, are as large as the square of the length, and computed again.
_DOTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Sums of fewer products are computed again sooner than written and read: a TPU v5e computes 240 products while it moves a
# byte, and what a loop keeps is written once and read twice, by the compiler's clock at a fraction of the bandwidth.
_LEAST_SUMMED = 2048


class Dots(TorchDispatchMode):
    """
    Context that records in `results` the matrix products with weights and the results of kernels, or gives `recorded_dots`,
    those of an earlier context, instead of computing them.
    """

    _contexts: ClassVar[list["Dots"]] = []

    def __init__(self, recorded_dots: list[Tensor] | None = None):
        super().__init__()
        self.results: list[Tensor] = []
        self._recorded_dots = None if recorded_dots is None else iter(recorded_dots)
        self._is_paused = False

    def __enter__(self) -> "Dots":
        Dots._contexts.append(self)
        return super().__enter__()

    def __exit__(self, *args) -> None:
        Dots._contexts.pop()
        super().__exit__(*args)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._is_paused or function not in _DOTS or args[-1].shape[0] < _LEAST_SUMMED:
            return function(*args, **(kwargs or {}))
        if self._recorded_dots is None:
            result = function(*args, **(kwargs or {}))
        else:
            result = next(self._recorded_dots)
            # Operators come here without the wrapper that tensors of lazy devices have for mutations.
            if torch._is_functional_tensor(result):
                result = torch._from_functional_tensor(result)
        self.results.append(result)
        return result


def instead_of_product(product: Tensor, place: int, num_summed: int, compute: Callable[[], Tensor]) -> Tensor:
    """
    What is computed in place of a linear layer's `product`, a sum of so many, which is dropped. Where [`Dots`] keep the
    product, as their result number `place`, they keep this instead: given again, it is what the layer seems to have computed.
    """
    if not Dots._contexts:
        return compute()
    dots = Dots._contexts[-1]
    is_kept = num_summed >= _LEAST_SUMMED
    if is_kept and dots._recorded_dots is not None:
        return product.view_as(product)
    with temporarily(dots, _is_paused=True):
        result = compute()
    if is_kept:
        dots.results[place] = result.reshape(dots.results[place].shape)
    return result


def num_kept() -> int:
    """How many results [`Dots`] have kept so far."""
    return len(Dots._contexts[-1].results) if Dots._contexts else 0


def keep_results(
    compute: Callable[[], tuple[Tensor, Tensor]], otherwise: Callable[[], tuple[Tensor, ...]] | None = None
) -> tuple[Tensor, ...]:
    """
    The two results of a kernel, kept and given again where [`Dots`] are; `otherwise` says what to compute where they are not.
    """
    if not Dots._contexts:
        return compute() if otherwise is None else otherwise()
    dots = Dots._contexts[-1]
    results = compute() if dots._recorded_dots is None else (next(dots._recorded_dots), next(dots._recorded_dots))
    dots.results += results
    return results


class _Recomputed(torch.autograd.Function):
    """
    Calls a function without a graph, and again with one in the backward pass. The gradients of parameters that it computes with
    are added to them there; `inputs` get theirs, and `anchor` has none: if it requires a gradient, so do the outputs.
    """

    @staticmethod
    def forward(ctx, call: Callable, backend: Backend, keeps_dots: bool, anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.call, ctx.backend, ctx.num_inputs = call, backend, len(inputs)
        numbers, ctx.state_of_host = RandomNumbers.current(backend.device), torch.get_rng_state()
        # What is computed again draws the same.
        ctx.random_numbers = partial(RandomNumbers, numbers.seed, numbers.chip, numbers.num_draws)
        ctx.autocast = current_autocast(backend.device.type)
        with torch.no_grad(), ctx.random_numbers() as own, Dots() if keeps_dots else nullcontext() as dots:
            outputs = call(*inputs)
        numbers.num_draws = own.num_draws
        ctx.save_for_backward(*inputs, *(dots.results if keeps_dots else ()))
        ctx.keeps_dots = keeps_dots
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        backend, count = ctx.backend, ctx.num_inputs
        # What is computed again depends on the gradient, so it is not what was computed before.
        present = [gradient for gradient in gradients if gradient is not None]
        tensors = backend.separate([*ctx.saved_tensors, *present])
        saved_tensors, present = tensors[: len(ctx.saved_tensors)], iter(tensors[len(ctx.saved_tensors) :])
        gradients = [None if gradient is None else next(present) for gradient in gradients]
        inputs = [
            value.detach().requires_grad_(needs)
            for value, needs in zip(saved_tensors[:count], ctx.needs_input_grad[4:], strict=True)
        ]
        dots = Dots(list(saved_tensors[count:])) if ctx.keeps_dots else nullcontext()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), ctx.autocast(), ctx.random_numbers(), dots:
            torch.set_rng_state(ctx.state_of_host)
            outputs = ctx.call(*inputs)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, None, None, *(value.grad for value in inputs)


def recompute(module: nn.Module, backend: Backend, keeps_dots: bool, function: Callable[..., Any], *args: Any) -> Any:
    """
    Call `function(*args)`, which computes with the parameters of `module`, and compute it again in the backward pass, from the
    tensors of `args` and, if it is a [`~functools.partial`], of its keywords. Whatever has a gradient without this has the same
    one, whether it is an input or a parameter, or has been left in a dictionary by another layer.

    PyTorch's own function fails on XLA (`torch.xla` does not exist), and a shim for that trains but saves nothing: XLA removes
    the recomputation as a duplicate. So would it with `torch.utils.checkpoint.create_selective_checkpoint_contexts`. torch_xla's
    needs an input with a gradient, which a layer does not have behind a frozen embedding, or where a model has none.

    Args:
        module ([`~torch.nn.Module`]): The module that `function` belongs to.
        backend ([`Backend`]): The backend in use.
        keeps_dots (`bool`):
            Whether to keep the results of matrix products with weights and of kernels, so that the rest alone is computed again.
        function (`Callable`): What to call.
        *args (`Any`): Its arguments.

    Returns:
        `Any`: Its result.
    """
    keywords = {}
    if isinstance(function, partial):
        keywords, function = function.keywords, partial(function.func, *function.args)
    leaves, structure = tree_flatten((args, tuple(keywords.items())), is_leaf=_is_store)
    num_positional = len(tree_leaves(args, is_leaf=_is_store))
    # What earlier layers have left for this one, such as keys and values, and what this one leaves, has gradients, too. The graph
    # holds empty stores only: in the layer's own store there will be tensors of that graph, which would never be freed.
    stores = {place: leaf for place, leaf in enumerate(leaves) if _is_store(leaf)}
    contents, structure_of_contents = tree_flatten([dict(store) for store in stores.values()])
    empty = {place: copy(store) for place, store in stores.items()}
    for store in empty.values():
        store.clear()
    leaves = [empty.get(place, leaf) for place, leaf in enumerate(leaves)]
    num_leaves, leaves = len(leaves), leaves + contents
    # Keywords such as masks are the same for all layers. Only those with a gradient have to pass through autograd's function.
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (place < num_positional or leaf.requires_grad)
    ]
    tensors = [leaves[place] for place in places]
    others = [None if place in places else leaf for place, leaf in enumerate(leaves)]
    structure_of_outputs, collects = None, are_collected()

    def call(*inputs: Tensor) -> tuple:
        nonlocal structure_of_outputs
        values = list(others)
        for place, value in zip(places, inputs, strict=True):
            values[place] = value
        before = tree_unflatten(values[num_leaves:], structure_of_contents)
        for (place, store), content in zip(empty.items(), before, strict=True):
            values[place] = copy(store)
            values[place].update(content)
        args, keywords = tree_unflatten(values[:num_leaves], structure)
        # Collected without a graph, logits would have no gradient.
        with collect_apart() if collects else nullcontext([]) as logits:
            result = function(*args, **dict(keywords))
        writes = [
            {key: value for key, value in values[place].items() if content.get(key) is not value}
            for place, content in zip(empty, before, strict=True)
        ]
        outputs, structure_of_outputs = tree_flatten((result, writes, logits))
        return tuple(outputs)

    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    anchor = torch.empty(0, requires_grad=is_trained)
    outputs = _Recomputed.apply(call, backend, keeps_dots, anchor, *tensors)
    result, writes, logits = tree_unflatten(outputs, structure_of_outputs)
    if collects:
        give_to_model(logits)
    for store, content in zip(stores.values(), writes, strict=True):
        store.update(content)
    return result


def _is_store(value: Any) -> bool:
    """Whether a layer may write into an argument: a dictionary, or one of transformers' own."""
    return isinstance(value, MutableMapping)


def rematerialize(model: nn.Module, policy: str, backend: Backend) -> None:
    """
    Make a model whose activation checkpointing is enabled compute again in the backward pass, by [`recompute`], what a policy says:
    `"full"` or `"dots"`; or nothing, with `"none"`.

    transformers keeps the function in `_gradient_checkpointing_func` of each layer that checkpoints its activations
    (`transformers/modeling_layers.py`), set when checkpointing is enabled.
    """
    if policy == "none":
        return
    for layer in model.modules():
        if "_gradient_checkpointing_func" not in vars(layer):
            continue
        before, function = layer._gradient_checkpointing_func, partial(recompute, layer, backend, policy == "dots")
        # An equal one stays: another object would be another step.
        if not (isinstance(before, partial) and (before.func, before.args) == (function.func, function.args)):
            function.instead_of = before
            layer._gradient_checkpointing_func = function


def checkpoint_as_upstream(model: nn.Module) -> None:
    """Make layers checkpoint their activations by what [`rematerialize`] has replaced, which runs operators as they come."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, partial) and function.func is recompute:
            module._gradient_checkpointing_func = function.instead_of


# ---- Logits of experts' routers, which transformers collects while a model runs, where layers are run otherwise than one by one ----

_NAME = "router_logits"


def are_collected() -> bool:
    """Whether the model that runs collects the logits of routers, as it does for the load-balancing loss."""
    return _NAME in (output_capturing._active_collector.get() or ())


@contextmanager
def collect_apart() -> Iterator[list[Tensor]]:
    """Within this context, the logits of routers go into the list that it returns, and not to the model."""
    logits: list[Tensor] = []
    collector = output_capturing._active_collector
    token = collector.set({**(collector.get() or {}), _NAME: logits})
    try:
        yield logits
    finally:
        collector.reset(token)


def give_to_model(logits: Iterable[Tensor]) -> None:
    """Have the model that runs collect these logits of routers."""
    output_capturing._active_collector.get()[_NAME].extend(logits)
