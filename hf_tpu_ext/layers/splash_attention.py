"""Splash attention: jax's kernel for TPU, inside the program."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils import logging

from ..backends.base import Backend
from ..formatting import dtype_name
from ..kernels.splash import SplashAttention, lower, why_not_lowered
from .activation_checkpointing import keep_results
from .autocast import matmul_dtype
from .sliced_attention import eager_attention, sliced_attention, why_whole
from .token_mask import TokenMask


logger = logging.get_logger(__name__)

#: Widths of heads that the compiler for TPU takes. Those between are filled up.
HEAD_DIMS = range(64, 257, 32)
_DTYPES = {"tpu": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float32)}


def why_no_splash(backend: Backend) -> str | None:
    """Why splash attention cannot be computed on a backend, and what to type, as a clause; `None` if it can."""
    if backend.kernels.platform is None:
        return f"there are no kernels on {backend.name}"
    return why_not_lowered()


class _Splash(torch.autograd.Function):
    """Keeps the output and the sums of exponentials, from which the backward pass computes the probabilities anew."""

    @staticmethod
    def forward(ctx, backend: Backend, kernel: SplashAttention, sinks: Tensor | None, *tensors: Tensor) -> Tensor:
        ctx.backend, ctx.kernel = backend, kernel
        output, sums = keep_results(lambda: _call(backend, kernel, "forward", tensors))
        output, sums = _with_sinks(output, sums, sinks)
        ctx.save_for_backward(sinks, *tensors, output, sums)
        return _by_token(backend, output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        sinks, *tensors, output, sums = ctx.saved_tensors
        gradient = gradient.transpose(1, 2)
        gradients = _call(ctx.backend, ctx.kernel, "backward", (*tensors, output, sums, gradient))
        of_sinks = None
        if ctx.needs_input_grad[2]:
            # What a sink takes from the output, in the direction of the gradient.
            share = torch.exp(sinks.float()[:, None] - sums)
            of_sinks = -(share * (gradient.float() * output.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return None, None, of_sinks, *gradients, None


def _with_sinks(output: Tensor, sums: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """
    Attention and logarithms of its sums of exponentials, `(rows, heads, length)`, with a further score in each sum: the sink of
    the head, which has no value. The kernel's backward pass goes by these two, and so is right with sinks.
    """
    if sinks is None:
        return output, sums
    # Not `logaddexp`, which torch_xla computes on the host.
    sinks = sinks.float()[:, None]
    largest = torch.maximum(sums, sinks)
    with_sinks = largest + torch.log(torch.exp(sums - largest) + torch.exp(sinks - largest))
    return (output * torch.exp(sums - with_sinks)[..., None]).to(output.dtype), with_sinks


def _by_token(backend: Backend, output: Tensor) -> Tensor:
    """
    Put the heads of a token one behind the other, once: the compiler for TPU would do it for everyone who reads the output, in a
    layout that takes longer.
    """
    (tokens,) = backend.separate([output.transpose(1, 2).flatten(2)])
    return tokens.unflatten(2, (output.shape[1], -1))


def _call(backend: Backend, kernel: SplashAttention, program: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each chip computes its own rows: of a kernel, the partitioner knows nothing and would gather them all."""
    programs = lower(kernel, backend.kernels.directory)
    sharding = backend.manual_sharding
    if sharding.active:
        return backend.kernels.call(programs[program], tensors)
    shards = tuple(sharding.full_to_shard(tensor, by_rows=True) for tensor in tensors)
    return tuple(map(sharding.shard_to_full, backend.kernels.call(programs[program], shards)))


def splash_attention(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TokenMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Attention by a kernel, for [`~transformers.AttentionInterface`]: scores are computed block by block, those that the mask
    leaves out are not, and none are kept. Sinks, `s_aux`, correct what the kernel gives. Where it cannot serve, attention goes in
    slices, and a line says why.
    """
    settings = {"scaling": scaling} | ({} if softcap is None else {"softcap": softcap})
    settings |= {} if s_aux is None else {"s_aux": s_aux}
    in_slices = partial(sliced_attention, backend, module, query, key, value, dropout=dropout, **settings, **kwargs)
    if query.shape[2] == 1:
        # A token after a prompt: its scores are few.
        return in_slices(attention_mask)
    dtype = matmul_dtype(query)
    if attention_mask is None and vars(module).get("is_causal") is False and query.shape[2] == key.shape[2]:
        # As in a vision tower: each token sees all.
        tokens = torch.ones(query.shape[0], query.shape[2], dtype=torch.int32, device=query.device)
        attention_mask = TokenMask(tokens, None, dtype, causal=False)
    reason = why_whole(backend, module, query, dropout, known_parameters=[s_aux]) or _why_not(
        backend, module, query, value, attention_mask, kwargs
    )
    if reason is not None:
        logger.warning_once(f"Attention of {type(module).__name__} is computed in slices: {reason}.")
        return in_slices(attention_mask)
    rows, heads, length, head_dim = query.shape
    width = next(width for width in HEAD_DIMS if width >= head_dim)
    chips = 1 if backend.manual_sharding.active else backend.num_chips
    kernel = SplashAttention(
        rows // chips,
        heads,
        key.shape[1],
        length,
        width,
        dtype_name(dtype),
        attention_mask.window,
        softcap,
        attention_mask.causal,
        backend.kernels.platform,
    )
    # Scaled before it is rounded.
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    tensors = tuple(pad(tensor.to(dtype), (0, width - head_dim)) for tensor in (query, key, value))
    documents = attention_mask.documents
    trained_tensors = tensors if s_aux is None else (*tensors, s_aux)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained_tensors):
        return _Splash.apply(backend, kernel, s_aux, *tensors, documents)[..., :head_dim], None
    without_sums = None if s_aux is not None else lambda: _call(backend, kernel, "infer", (*tensors, documents))
    output, *sums = keep_results(lambda: _call(backend, kernel, "forward", (*tensors, documents)), without_sums)
    if s_aux is not None:
        output, _ = _with_sinks(output, *sums, s_aux)
    return _by_token(backend, output)[..., :head_dim], None


def _why_not(
    backend: Backend, module: nn.Module, query: Tensor, value: Tensor, mask: Tensor | TokenMask | None, others: dict
) -> str | None:
    rows, _, _, head_dim = query.shape
    parameters = inspect.signature(eager_attention(module)).parameters
    more = [
        name
        for name, argument in others.items()
        if name in parameters and argument is not None and name != "sliding_window"
    ]
    dtype = matmul_dtype(query)
    if not isinstance(mask, TokenMask):
        return "its mask is another than causal, sliding window, packed, padded or none"
    if more:
        return f"the kernel knows nothing of {', '.join(more)}"
    if dtype not in _DTYPES[backend.kernels.platform]:
        return f"the kernel computes in bfloat16, and this model in {dtype_name(dtype)}"
    if value.shape[-1] != head_dim:
        return "its values have another width than its keys"
    if not HEAD_DIMS.start <= head_dim < HEAD_DIMS.stop:
        return f"the kernel takes heads of {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    if not backend.manual_sharding.active and rows % backend.num_chips:
        return f"{rows} rows do not divide by {backend.num_chips} chips"
    return None
