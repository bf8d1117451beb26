"""A vision language model that takes images in static shapes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ..backends.base import Backend
from ..layers.attention import has_kernel
from ..layers.sliced_attention import sliced_attention
from ..layers.splash_attention import splash_attention
from ..layers.static_kernels import find_transformers_model
from ..layers.token_mask import TokenMask
from .families import FAMILIES, PIXELS, ImageFamily, Patches


# By this name upstream hands the lengths of segments on as a tensor, as it does for Flash Attention. For any other it reads them
# on the host, and cuts queries and keys.
_SEGMENTS = "flash_by_segments"


def find_base(model: nn.Module) -> PreTrainedModel | None:
    """The part of a model that takes images, if it is of a family of [`FAMILIES`]; in wrappers such as [`~peft.PeftModel`], too."""
    whole = find_transformers_model(model)
    return whole.base_model if whole is not None and whole.config.model_type in FAMILIES else None


def adds_between_layers(model: nn.Module) -> bool:
    """Whether a model adds features of images to what its layers hand on, so that these are no loop."""
    base = find_base(model)
    return base is not None and FAMILIES[base.config.model_type].adds_between_layers


def take_static_images(model: nn.Module, backend: Backend) -> None:
    """
    Make a model, in place, take images as [`ImageCollator`] lays them out. Of anything else it takes what it took.

    A hook computes the embeddings of text and images, and upstream's forward pass goes on from these: it never comes to its own
    code that goes by the data.
    """
    base = find_base(model)
    if base is None or any(
        isinstance(hook, partial) and hook.func is _embed for hook in base._forward_pre_hooks.values()
    ):
        return
    family = FAMILIES[base.config.model_type](base)
    if isinstance(family, Patches):
        attend = splash_attention if has_kernel(base) else sliced_attention
        AttentionInterface.register(_SEGMENTS, partial(_attend_in_segments, partial(attend, backend)))
        base.visual.config._attn_implementation = _SEGMENTS
    base.register_forward_pre_hook(partial(_embed, family), with_kwargs=True)
    if family.adds_between_layers:
        text = base.get_decoder()
        text.register_forward_pre_hook(_hand_on, with_kwargs=True)
        text._deepstack_process = partial(_add, text)


def _embed(
    family: ImageFamily, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    if PIXELS not in kwargs:
        return None
    kwargs = dict(kwargs)
    ids = kwargs.pop("input_ids")
    is_image = ids == model.config.image_token_id
    # Some models have no embedding of it.
    embeddings = model.get_input_embeddings()(ids.masked_fill(is_image, 0))
    features, *more = family.features(model, kwargs)
    rows = len(ids)
    room = len(features) // rows
    # Each image token takes the next feature of its row.
    places = (is_image.long().cumsum(1) - 1).clamp(0, room - 1)
    places = places + torch.arange(rows, device=ids.device)[:, None] * room

    def take(features: Tensor, elsewhere: Tensor) -> Tensor:
        of_images = nn.functional.embedding(places, features.to(embeddings.dtype))
        return torch.where(is_image[..., None], of_images, elsewhere)

    kwargs["inputs_embeds"] = take(features, embeddings)
    if more:
        kwargs[_ADDED] = [take(features, torch.zeros_like(embeddings)) for features in more]
    return args, kwargs


# What upstream calls `deepstack_visual_embeds`, of all tokens of a row. Upstream's forward pass gives its own, of image tokens.
_ADDED = "deepstack_by_row"


def _hand_on(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    if _ADDED not in kwargs:
        return None
    kwargs = dict(kwargs)
    kwargs["deepstack_visual_embeds"] = kwargs.pop(_ADDED)
    return args, kwargs


def _add(model: PreTrainedModel, hidden: Tensor, mask: Tensor | None, features: Tensor) -> Tensor:
    """As upstream's `_deepstack_process`, which has a mask, and features for where it is true."""
    return (
        hidden + features.to(hidden.dtype)
        if mask is None
        else type(model)._deepstack_process(model, hidden, mask, features)
    )


def _attend_in_segments(
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
