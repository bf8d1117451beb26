"""The most likely tokens of a teacher at every position, without all of its logits at once."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import Backend
from .fused_head import Head, split_tokens


# Logits of one chunk of tokens: 64 MB in float32.
_CHUNK_ELEMENTS = 2**24


class TeacherRows(NamedTuple):
    """
    A teacher's next-token distributions as a cache holds them, for any of its temperatures.

    The log-probability of an entry at temperature T is `values / T - normalisers[:, index of T]`.

    Args:
        ids (`torch.Tensor` of shape `(tokens, top_k)`): Token ids in int32, most likely first.
        values (`torch.Tensor` of shape `(tokens, top_k)`): Finite log-probabilities at temperature 1 in float16.
        normalisers (`torch.Tensor` of shape `(tokens, num_temperatures)`):
            `logsumexp(logits / T) - logsumexp(logits) / T` in float32.
        log_tails (`torch.Tensor` of shape `(tokens, num_temperatures)`):
            Logarithm of the mass of all other tokens in float16; `-inf` where there are none.
    """

    ids: Tensor
    values: Tensor
    normalisers: Tensor
    log_tails: Tensor

    @classmethod
    def of(cls, logits: Tensor, top_k: int, temperatures: tuple[float, ...]) -> "TeacherRows":
        """The `top_k` most likely tokens of logits `(tokens, vocabulary)`, normalised for each temperature."""
        largest, ids = logits.topk(top_k)
        # Their sum, not a difference to 1, which would be rounding alone where the teacher is sure of itself.
        others = logits.scatter(-1, ids, -math.inf)
        logsumexp = logits.logsumexp(-1, keepdim=True)
        by_temperature = [(logits / temperature).logsumexp(-1, keepdim=True) for temperature in temperatures]
        normalisers = [at - logsumexp / t for at, t in zip(by_temperature, temperatures, strict=True)]
        log_tails = [
            (others / t).logsumexp(-1, keepdim=True) - at for at, t in zip(by_temperature, temperatures, strict=True)
        ]
        # A token that the model never says has a logit of -inf, which would make NaN of 0 times it.
        values = (largest - logsumexp).clamp(min=torch.finfo(torch.float16).min)
        return cls(ids.int(), values.half(), torch.cat(normalisers, -1).float(), torch.cat(log_tails, -1).half())


def top_k_rows(
    head: Head, top_k: int, temperatures: tuple[float, ...], backend: Backend, dtype: torch.dtype | None = None
) -> TeacherRows:
    """
    Take the most likely tokens of a teacher's [`Head`], a chunk of tokens at a time; `dtype` is that of the product.

    On XLA the chunks are the iterations of one loop, so that no more than one chunk's logits exist; on several chips each
    goes through its own rows.
    """
    if backend.num_chips > 1:
        head = head.full_to_shard(backend)
    tokens = head.hidden.shape[0]
    chunks = split_tokens(head.hidden, max(8, _CHUNK_ELEMENTS // head.weight.shape[0]))
    compute_dtype = head.hidden.dtype if dtype is None else dtype

    def top_k_of_chunk(carry: tuple, chunk: tuple[Tensor]) -> tuple[tuple, tuple]:
        logits = head._replace(hidden=chunk[0]).logits(compute_dtype)
        return carry, tuple(TeacherRows.of(logits, top_k, temperatures))

    _, results = backend.loops.scan(top_k_of_chunk, (), (chunks,))
    results = (result.reshape(-1, result.shape[-1])[:tokens] for result in results)
    if backend.num_chips > 1:
        results = (backend.manual_sharding.shard_to_full(result) for result in results)
    return TeacherRows(*results)
