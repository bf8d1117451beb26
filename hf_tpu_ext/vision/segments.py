"""Attention within segments of a row of patches, whose lengths are data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.token_mask import TokenMask


#: By this name upstream hands the lengths of segments on as a tensor, as it does for Flash Attention. For any other it reads them
#: on the host, and cuts queries and keys.
NAME = "flash_by_segments"


def attend_in_segments(
    attend: Callable,
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
    Attention of `(1, heads, patches, width)` within segments, for [`~transformers.AttentionInterface`], as `attend` computes it.

    `cu_seq_lens_q` has the number of each patch's segment, `(rows, patches of a row)`; or, where a model is called with images as
    upstream lays them out, the ends of the segments of all patches.
    """
    segments = cu_seq_lens_q
    if segments.ndim == 1:
        places = torch.arange(query.shape[2], device=query.device)
        segments = (places[:, None] >= segments[None, 1:]).sum(1)[None]
    rows = segments.shape[0]
    query, key, value = (tensor.squeeze(0).unflatten(1, (rows, -1)).transpose(0, 1) for tensor in (query, key, value))
    mask = TokenMask((segments + 1).int(), None, query.dtype, causal=False)
    output, _ = attend(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    return output.flatten(0, 1)[None], None
