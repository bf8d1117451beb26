"""Attention within segments of a row of patches, whose lengths are data."""

from typing import Any

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from ..layers.sliced_attention import sliced_attention


#: By this name upstream hands the lengths of segments on as a tensor, as it does for Flash Attention. For any other it reads them
#: on the host, and cuts queries and keys.
NAME = "flash_by_segments"


def attend_in_segments(
    backend: Backend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Attention of `(1, heads, patches, width)` within segments, for [`~transformers.AttentionInterface`].

    `cu_seq_lens_q` has the number of each patch's segment, `(rows, patches of a row)`; or, where a model is called with images as
    upstream lays them out, the ends of the segments of all patches.
    """
    segments = cu_seq_lens_q
    if segments.ndim == 1:
        places = torch.arange(query.shape[2], device=query.device)
        segments = (places[:, None] >= segments[None, 1:]).sum(1)[None]
    rows = segments.shape[0]
    query, key, value = (tensor.squeeze(0).unflatten(1, (rows, -1)).transpose(0, 1) for tensor in (query, key, value))
    apart = segments[:, None, :, None] != segments[:, None, None, :]
    mask = torch.zeros(apart.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill(apart, torch.finfo(query.dtype).min)
    output, _ = sliced_attention(backend, module, query, key, value, mask, dropout=dropout, scaling=scaling)
    return output.flatten(0, 1)[None], None
