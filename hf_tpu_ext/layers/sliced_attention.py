"""Attention in slices: the scores of a whole batch are never there at once."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from ..temporarily import temporarily
from .autocast import current_autocast
from .token_mask import TokenMask


#: Scores of a slice at most. As many in float32 are 16 MB.
SLICE_ELEMENTS = 2**22
# What can be cut, in this order, and the dimensions that it has in query, key, value and mask, or the two parts that a mask is made
# of, and in the output. Rows and heads know nothing of one another. Blocks of queries share keys and values, whose gradients are
# sums over the blocks.
_CUTS = (((0, 0, 0, 0, 0), 0), ((1, 1, 1, 1, 1), 2), ((2, None, None, 2, None), 1))


class _Slices(torch.autograd.Function):
    """Attention of slices, one after the other. The backward pass computes the scores of each anew."""

    @staticmethod
    def forward(ctx, attend: Callable, dims: tuple, output_dim: int, parts: int, backend: Backend, *tensors: Tensor):
        ctx.attend, ctx.output_dim, ctx.parts, ctx.backend = attend, output_dim, parts, backend
        # A dimension of one is the same for all slices.
        ctx.dims = [
            None if dim is None or tensor.shape[dim] == 1 else dim
            for dim, tensor in zip(dims[: len(tensors)], tensors, strict=True)
        ]
        ctx.autocast = current_autocast(tensors[0].device.type)
        ctx.save_for_backward(*tensors)

        def attend_slice(shared: tuple, entries: tuple) -> tuple:
            return shared, (attend(*_together(ctx.dims, shared, entries)),)

        with torch.no_grad():
            # Each iteration would compute anew what the loop does not carry.
            _, (outputs,) = backend.loops.scan(attend_slice, *_shared_and_own(ctx.dims, tensors, parts))
        return _merge(outputs, output_dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        is_needed = ctx.needs_input_grad[5:]
        is_cut = [dim is not None for dim in ctx.dims]
        shared, entries = _shared_and_own(ctx.dims, ctx.saved_tensors, ctx.parts)
        sums = tuple(
            torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            for tensor, cut, needs_grad in zip(ctx.saved_tensors, is_cut, is_needed, strict=True)
            if needs_grad and not cut
        )

        def differentiate_slice(carry: tuple, entries: tuple) -> tuple:
            shared, sums = carry
            gradient, *entries = entries
            # On this thread, as the loop over layers has it.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                tensors = [
                    tensor.detach().requires_grad_(needs_grad)
                    for tensor, needs_grad in zip(_together(ctx.dims, shared, entries), is_needed, strict=True)
                ]
                with ctx.autocast():
                    output = ctx.attend(*tensors)
                gradients = torch.autograd.grad(output, list(compress(tensors, is_needed)), gradient)
            by_slice = list(compress(is_cut, is_needed))
            more = [gradient for gradient, cut in zip(gradients, by_slice, strict=True) if not cut]
            sums = tuple(total + gradient for total, gradient in zip(sums, more, strict=True))
            return (shared, sums), tuple(compress(gradients, by_slice))

        entries = (_split(gradient, ctx.output_dim, ctx.parts), *entries)
        (_, sums), stacked_gradients = ctx.backend.loops.scan(differentiate_slice, (shared, sums), entries)
        sums, stacked_gradients = iter(sums), iter(stacked_gradients)
        gradients = [
            None
            if not needs_grad
            else _merge(next(stacked_gradients), dim)
            if dim is not None
            else next(sums).to(tensor.dtype)
            for tensor, dim, needs_grad in zip(ctx.saved_tensors, ctx.dims, is_needed, strict=True)
        ]
        return *[None] * 5, *gradients


def _split(tensor: Tensor, dim: int, parts: int) -> Tensor:
    return tensor.unflatten(dim, (parts, -1)).movedim(dim, 0)


def _merge(parts: Tensor, dim: int) -> Tensor:
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _shared_and_own(dims: list[int | None], tensors: tuple[Tensor, ...], parts: int) -> tuple[tuple, tuple]:
    """What all slices share, and what each has of its own, stacked."""
    shared = tuple(tensor.detach() for dim, tensor in zip(dims, tensors, strict=True) if dim is None)
    own = (_split(tensor.detach(), dim, parts) for dim, tensor in zip(dims, tensors, strict=True) if dim is not None)
    return shared, tuple(own)


def _together(dims: list[int | None], shared: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> list[Tensor]:
    shared, own = iter(shared), iter(own)
    return [next(shared) if dim is None else next(own) for dim in dims]


def _choose_parts(query: Tensor, key: Tensor, num_chips: int) -> list[int]:
    """Into how many parts to cut rows, heads and queries. Parts of a cut have the same size; heads of one key stay together."""
    batch, heads, queries, _ = query.shape
    num_slices = ceil(batch * heads * queries * key.shape[2] / (num_chips * SLICE_ELEMENTS))
    counts = []
    # Rows that are split over chips are on all of them at once.
    for size in (batch if num_chips == 1 else 1, key.shape[1], queries):
        counts.append(max(parts for parts in range(1, min(size, num_slices) + 1) if size % parts == 0))
        num_slices = ceil(num_slices / counts[-1])
    return counts


def eager_attention(module: nn.Module) -> Callable:
    """A model's own eager attention, given a module that attends."""
    # Each model has its own, under this name.
    return inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]


def why_whole(
    backend: Backend, module: nn.Module, query: Tensor, dropout: float, known_parameters: Sequence[Tensor | None] = ()
) -> str | None:
    """
    Why attention of a module is computed by its own function alone, as a clause; `None` if it may be otherwise. The caller
    knows what is done with `known_parameters` of its own.
    """
    if query.device.type != backend.device.type:
        return f"it runs on {query.device.type}"
    if dropout > 0 and module.training:
        return f"attention_dropout={dropout}, whose masks would have to be drawn again"
    if any(all(parameter is not one for one in known_parameters) for parameter in module.parameters(recurse=False)):
        # Sinks, for one.
        return "nothing is known of its own parameters"
    return None


def _attend_one(
    backend: Backend,
    eager: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """
    Attention of one token to those in a cache. Heads that share a key are queries of it: the cache is not repeated for each of
    them. On the host they come one after the other, as products of a vector and a matrix, which XLA compiles. For products of
    many small matrices it would call a library once for each, which takes up to twice as long.
    """
    rows, heads, _, width = query.shape
    groups = vars(module)["num_key_value_groups"]
    query = query.reshape(rows, -1, groups, width)
    queries = query.split(1, 2) if backend.kernels.platform == "cpu" else [query]
    with temporarily(module, num_key_value_groups=1):
        outputs = [eager(module, each, key, value, mask, **kwargs)[0] for each in queries]
    return torch.cat(outputs, 1).transpose(1, 2).reshape(rows, 1, heads, -1)


def sliced_attention(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TokenMask | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    Attention of some rows, some heads, or some queries at a time, for [`~transformers.AttentionInterface`].

    A slice is computed by the model's own eager attention, in the forward pass and again in the backward pass, so the numbers
    are the same, and there are never more scores, probabilities and gradients of them than those of one slice; of a
    [`TokenMask`] neither are there more masks. Eager attention itself is used where all scores are no more than a slice, on
    another device than the backend's, with dropout of probabilities, and where attention knows more than queries, keys, values
    and a mask: sinks, position biases. As with transformers' other implementations there is no `output_attentions`.
    """
    eager = eager_attention(module)
    used = {name: value for name, value in kwargs.items() if name in inspect.signature(eager).parameters}
    mask, by_token = attention_mask, isinstance(attention_mask, TokenMask)
    inputs = [query, key, value]
    if by_token:
        inputs += [mask.queries(), mask.keys()]
    elif mask is not None:
        inputs.append(mask)
    whole = (
        why_whole(backend, module, query, dropout) is not None
        # What else there is, by head or by query: sinks, position biases.
        or any(isinstance(value, Tensor) for value in used.values())
        or any(tensor.requires_grad for tensor in inputs[3:])
    )
    shares_keys = "num_key_value_groups" in vars(module)
    if not whole and shares_keys and query.shape[2] == 1 and not by_token:
        return _attend_one(backend, eager, module, *inputs, dropout=0.0, **used), None
    parts = [] if whole else _choose_parts(query, key, 1 if backend.manual_sharding.active else backend.num_chips)
    if all(count == 1 for count in parts):
        return eager(
            module, query, key, value, mask.block(*inputs[3:]) if by_token else mask, dropout=dropout, **kwargs
        )

    def attend(query: Tensor, key: Tensor, value: Tensor, *of_mask: Tensor) -> Tensor:
        mask_of_slice = mask.block(*of_mask) if by_token else of_mask[0] if of_mask else None
        return eager(module, query, key, value, mask_of_slice, dropout=0.0, **used)[0]

    for (dims, output_dim), count in reversed(list(zip(_CUTS, parts, strict=True))):
        if count > 1:
            attend = partial(_Slices.apply, attend, dims, output_dim, count, backend)
    return attend(*inputs), None
