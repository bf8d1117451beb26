"""Attention masks that are kept as one number for each token, for whoever computes scores block by block."""

from collections.abc import Callable
from inspect import getclosurevars
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function


class TokenMask(NamedTuple):
    """
    Each token sees those of its document: all, or those before it and itself.

    A tuple, for whoever goes through the tensors of arguments to find the one in it.

    Args:
        documents (`torch.Tensor` of shape `(batch, length)`):
            The number of each token's document, and 0 for padding, int32. Padding sees padding.
        window (`int` or `None`): How many tokens a token sees at most, itself included.
        dtype (`torch.dtype`): Dtype of the mask that is added to scores.
        causal (`bool`, *optional*, defaults to `True`):
            Whether a token sees those before it only, and itself. Else there is no window.
    """

    documents: Tensor
    window: int | None
    dtype: torch.dtype
    causal: bool = True

    def queries(self) -> Tensor:
        """Document and position of the tokens that attend: `(batch, 1, length, 2)`."""
        positions = torch.arange(self.documents.shape[1], dtype=torch.int32, device=self.documents.device)
        return torch.stack([self.documents, positions.expand_as(self.documents)], -1)[:, None]

    def keys(self) -> Tensor:
        """Document and position of the tokens that are attended to: `(batch, 1, 2, length)`."""
        return self.queries().transpose(2, 3)

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The mask that is added to the scores of some [`queries`] and [`keys`]: `(batch, 1, queries, keys)`."""
        distance = queries[..., 1:2] - keys[..., 1:2, :]
        visible = queries[..., 0:1] == keys[..., 0:1, :]
        if self.causal:
            visible = visible & (distance >= 0)
        if self.window is not None:
            visible = visible & (distance < self.window)
        return torch.where(
            visible, torch.zeros((), dtype=self.dtype, device=visible.device), torch.finfo(self.dtype).min
        ).to(self.dtype)


def make_token_mask(
    mask_function: Callable,
    attention_mask: Tensor | None,
    segment_ids: Tensor | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> TokenMask | None:
    """
    Make a mask of what transformers gives to functions that make masks, and of `segment_ids` as in
    [`~hf_tpu_ext.layers.attention.static_masks`]; `None` for another pattern than that of a [`TokenMask`].
    """
    if mask_function is causal_mask_function:
        window = None
    elif (window := _window_of(mask_function)) is None:
        return None
    if q_length != kv_length or (attention_mask is not None and tuple(attention_mask.shape) != (batch_size, q_length)):
        return None
    documents = torch.ones(batch_size, q_length, dtype=torch.int32, device=device)
    for mask in (segment_ids, attention_mask):
        if mask is not None:
            documents = documents * mask.to(torch.int32)
    return TokenMask(documents, window, dtype)


def _window_of(mask_function: Callable) -> int | None:
    """The sliding window of a function as transformers makes it, which says so by what it is made of."""
    parts, window_parts = (
        tuple(getclosurevars(function).nonlocals.get("mask_functions", ()))
        for function in (mask_function, sliding_window_causal_mask_function(1))
    )
    if [part.__qualname__ for part in parts] != [part.__qualname__ for part in window_parts]:
        return None
    return getclosurevars(parts[0]).nonlocals["sliding_window"]
