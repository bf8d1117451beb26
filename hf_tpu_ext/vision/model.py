"""A vision language model that takes images in static shapes."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from ..backends.base import Backend
from .families import FAMILIES, PIXELS, ImageFamily, Patches
from .segments import NAME, attend_in_segments


def find_base(model: nn.Module) -> PreTrainedModel | None:
    """The part of a model that takes images, if it is of a family of [`FAMILIES`]; in wrappers such as [`~peft.PeftModel`], too."""
    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    return whole.base_model if whole is not None and whole.config.model_type in FAMILIES else None


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
        AttentionInterface.register(NAME, partial(attend_in_segments, backend))
        base.visual.config._attn_implementation = NAME
    base.register_forward_pre_hook(partial(_embed, family), with_kwargs=True)


def _embed(
    family: ImageFamily, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    if PIXELS not in kwargs:
        return None
    kwargs = dict(kwargs)
    ids = kwargs.pop("input_ids")
    is_image = ids == model.config.image_token_id
    # Some models have no embedding of it.
    embedded = model.get_input_embeddings()(ids.masked_fill(is_image, 0))
    features = family.features(model, kwargs).to(embedded.dtype)
    rows = len(ids)
    room = len(features) // rows
    # Each image token takes the next feature of its row.
    places = (is_image.long().cumsum(1) - 1).clamp(0, room - 1)
    places = places + torch.arange(rows, device=ids.device)[:, None] * room
    kwargs["inputs_embeds"] = torch.where(is_image[..., None], nn.functional.embedding(places, features), embedded)
    return args, kwargs
