"""Attention masks without host reads, and for packed rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
)

from .sliced_attention import SLICED_EAGER


def _static_mask(*, mask_function, segment_ids: torch.Tensor | None, **kwargs) -> torch.Tensor:
    if segment_ids is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(segment_ids))
    # Upstream leaves the mask out where it finds nothing masked, which it reads from the device.
    return eager_mask(mask_function=mask_function, **{**kwargs, "allow_is_bidirectional_skip": False})


@contextmanager
def static_masks(segment_ids: torch.Tensor | None = None) -> Iterator[None]:
    """
    Within this context, models with eager attention, whole or in slices, build their attention masks in a static shape and
    without reading the device.

    With `segment_ids`, tokens attend only within their own document (block-diagonal), on top of whatever pattern the
    model asks for (causal, sliding window). The mask is made once per forward pass by transformers' own mask functions;
    only the entries that they look up for it are replaced meanwhile.

    Args:
        segment_ids (`torch.Tensor` of shape `(batch, length)`, *optional*):
            Number of the document that each token belongs to; 0 for padding.
    """
    names = ("eager", SLICED_EAGER)
    ALL_MASK_ATTENTION_FUNCTIONS.update(dict.fromkeys(names, partial(_static_mask, segment_ids=segment_ids)))
    try:
        yield
    finally:
        for name in names:
            del ALL_MASK_ATTENTION_FUNCTIONS[name]
