"""
Attention: which one models compute with, its masks, and what it costs. Everybody else asks here, and knows no implementation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
)

from ..backends.base import Backend
from .sliced_attention import SLICE_ELEMENTS, SLICED_EAGER, register_sliced_attention


# What has to be done before models can compute with it.
_REGISTER = {SLICED_EAGER: register_sliced_attention}
# What it is computed with, where nobody has asked for more than a mask.
_SAME_NUMBERS = (None, "eager", "sdpa")


def attention_for(backend: Backend) -> str | None:
    """
    Make the attention that a backend asks for known to transformers.

    Args:
        backend ([`Backend`]):
            The backend in use.

    Returns:
        `str` or `None`: Its name from now on; `None` where models keep the one that they have.
    """
    if backend.attention is not None:
        _REGISTER[backend.attention](backend)
    return backend.attention


def attention_to_load_with(asked: str | None) -> tuple[str, list[str]]:
    """
    Choose what a model is loaded with whose attention is replaced when it is placed, where the caller asked for the
    `attn_implementation`. Returns its name, and a line where the caller's choice has no effect.
    """
    replaced = (
        [] if asked in _SAME_NUMBERS else [f"attn_implementation={asked} is replaced by attention that XLA compiles"]
    )
    return "eager", replaced


def is_sliced(model: nn.Module) -> bool:
    """Whether a transformers model goes through its attention in slices."""
    return model.config._attn_implementation == SLICED_EAGER


def scores_at_once(count: int, sliced: bool) -> int:
    """
    How many scores of a layer, of which there are rows times heads times the square of the length, are in memory at
    once. Where these are not all, as in `sliced` attention, the backward pass computes them anew.
    """
    return min(count, SLICE_ELEMENTS) if sliced else count


def _static_mask(*, mask_function, segment_ids: torch.Tensor | None, **kwargs) -> torch.Tensor:
    if segment_ids is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(segment_ids))
    # Upstream leaves the mask out where it finds nothing masked, which it reads from the device.
    return eager_mask(mask_function=mask_function, **{**kwargs, "allow_is_bidirectional_skip": False})


@contextmanager
def static_masks(segment_ids: torch.Tensor | None = None) -> Iterator[None]:
    """
    Within this context, models with eager attention, whole or in slices, build their attention masks in a static shape
    and without reading the device.

    With `segment_ids` of shape `(batch, length)`, the number of each token's document and 0 for padding, tokens attend
    only within their own document (block-diagonal), on top of whatever pattern the model asks for (causal, sliding
    window). The mask is made once per forward pass by transformers' own mask functions; only the entries that they
    look up for it are replaced meanwhile.
    """
    names = ("eager", SLICED_EAGER)
    ALL_MASK_ATTENTION_FUNCTIONS.update(dict.fromkeys(names, partial(_static_mask, segment_ids=segment_ids)))
    try:
        yield
    finally:
        for name in names:
            del ALL_MASK_ATTENTION_FUNCTIONS[name]
