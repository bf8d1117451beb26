"""
Attention: which one models compute with, its masks, and what it costs. Everybody else asks here, and knows no implementation.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    eager_mask,
    packed_sequence_mask_function,
    sdpa_mask,
)
from transformers.utils import logging

from ..backends.base import Backend
from ..errors import UserError
from ..temporarily import temporarily
from .shared_prompts import attend_each_row, mask_each_row
from .sliced_attention import SLICE_ELEMENTS, sliced_attention
from .splash_attention import splash_attention, why_no_splash
from .static_kernels import find_transformers_model, is_of_user
from .token_mask import TokenMask, make_token_mask


logger = logging.get_logger(__name__)

#: What can be asked for.
ATTENTIONS = ("auto", "splash", "slices")
# What models call them. The first is for models whose own code may look into masks, so these are tensors; the second has a
# [`TokenMask`] for long rows, the third always.
_SLICED_EAGER, _SLICED, _SPLASH = "sliced_eager", "sliced", "splash"
_IMPLEMENTATIONS = {_SLICED_EAGER: sliced_attention, _SLICED: sliced_attention, _SPLASH: splash_attention}
# The kinds of layers that attend as the masks say that they get, or not at all. Others, such as those that choose tokens by an
# index, do more where the attention is called "eager" or "sdpa", and leave that out where it has another name.
_PLAIN_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "window_attention",
    "attention",
    "moe",
    "mlp",
}
# And those that carry a state from token to token, by themselves or beside attention.
_STATEFUL_LAYERS = {"linear_attention", "mamba", "recurrent", "conv", "hybrid", "hybrid_sliding"}
# Values of `attn_implementation` with which attention has the same numbers as here: no line says that they have no effect.
_SAME_NUMBERS = (None, "eager", "sdpa")


def choose_attention(model: nn.Module, backend: Backend, setting: str = "auto") -> str:
    """
    Choose the attention that a model is to compute with on a backend, and make it known to transformers. One that code outside
    transformers has registered, and that the model was loaded with, is kept: it may compute something of its own.

    Args:
        model ([`~torch.nn.Module`]): The model, or a wrapper of it.
        backend ([`Backend`]): The backend in use.
        setting (`str`, *optional*, defaults to `"auto"`): One of [`ATTENTIONS`].

    Returns:
        `str`: Its name from now on.

    Raises:
        `ValueError`: Splash attention is asked for and not there, or any while the model keeps its own. The message says what to
            type.
    """
    for name, function in _IMPLEMENTATIONS.items():
        AttentionInterface.register(name, partial(attend_each_row, partial(function, backend)))
        AttentionMaskInterface.register(name, eager_mask)
    model = find_transformers_model(model) or model
    is_known = isinstance(model, PreTrainedModel)
    if is_known and is_of_user(AttentionInterface(), own := model.config._attn_implementation):
        if setting != "auto":
            raise UserError(
                f"attention={setting!r} does not go together with the attention {own!r}, which is registered by your own code and "
                "which the model was loaded with. Leave out one of the two."
            )
        return own
    if is_known and (kinds := _kinds_of_layers(model) - _PLAIN_LAYERS - _STATEFUL_LAYERS):
        if setting != "auto":
            raise UserError(
                f"attention={setting!r} is not possible: layers of {type(model).__name__} are of the kind {', '.join(sorted(kinds))}, "
                "which only the model's own attention computes. Leave it out."
            )
        return "eager"
    # The kernel is for TPU. Elsewhere it is interpreted, which is slow.
    wants_splash = setting == "splash" or (setting == "auto" and backend.kernels.platform == "tpu")
    # Such models take masks that are no tensors, and so do not look into them.
    opaque = is_known and model._supports_flex_attn
    reason = None if opaque else f"code of {type(model).__name__} may look into masks"
    name = _SLICED if reason is None else _SLICED_EAGER
    if wants_splash:
        reason = reason or why_no_splash(backend)
        if reason is None:
            name = _SPLASH
        elif setting == "splash":
            raise UserError(f"attention='splash' is not possible: {reason}. Leave it out, or set it to 'slices'.")
        else:
            logger.warning_once(f"Attention is computed in slices: {reason}.")
    return name


def carries_state(model: nn.Module) -> bool:
    """Whether layers of a transformers model carry a state over a row, which no mask keeps from going from document to document."""
    return isinstance(model, PreTrainedModel) and (
        model._is_stateful or not _STATEFUL_LAYERS.isdisjoint(_kinds_of_layers(model))
    )


def _kinds_of_layers(model: PreTrainedModel) -> set[str]:
    return set(vars(model.config.get_text_config()).get("layer_types") or ())


def attention_to_load_with(attn_implementation: str | None, traces_steps: bool = True) -> tuple[str, list[str]]:
    """
    Choose what a model is loaded with whose attention is replaced when it is placed, or kept where `traces_steps` is false and
    the caller asked for the `attn_implementation`. Returns its name, and a line where the caller's choice has no effect.
    """
    if is_of_user(AttentionInterface(), attn_implementation):
        return attn_implementation, []
    if attn_implementation in _SAME_NUMBERS:
        return "eager" if traces_steps else attn_implementation or "sdpa", []
    name, instead = "sdpa", "sdpa: its kernels are not for TPU"
    if traces_steps:
        name, instead = "eager", "attention that XLA compiles"
    return name, [f"attn_implementation={attn_implementation} is replaced by {instead}"]


def has_kernel(model: nn.Module) -> bool:
    """Whether a transformers model goes through the kernel."""
    return model.config._attn_implementation == _SPLASH


def is_sliced(model: nn.Module) -> bool:
    """Whether a transformers model goes through its attention in slices."""
    return model.config._attn_implementation in (_SLICED_EAGER, _SLICED)


def takes_shared_prompts(model: nn.Module) -> bool:
    """Whether a transformers model goes through an attention that knows of [`~hf_tpu_ext.layers.shared_prompts.SharedPrompts`]."""
    return model.config._attn_implementation in (_SLICED, _SPLASH)


@contextmanager
def without_kernels(backend: Backend) -> Iterator[None]:
    """Within this context, models that attend with a kernel attend in slices, for whoever traces them in other shapes than those of steps."""
    kernel = AttentionInterface().get(_SPLASH)
    AttentionInterface.register(_SPLASH, partial(attend_each_row, partial(sliced_attention, backend)))
    try:
        yield
    finally:
        AttentionInterface.register(_SPLASH, kernel)


# Of the contexts in which masks are static, the innermost last.
_segments: list[torch.Tensor | None] = []


def _static_mask(name: str, *, mask_function, q_length: int, **kwargs) -> torch.Tensor | TokenMask:
    segment_ids = _segments[-1]
    if name == _SPLASH or (name == _SLICED and q_length**2 > SLICE_ELEMENTS):
        arguments = {key: kwargs[key] for key in ("attention_mask", "batch_size", "kv_length", "device", "dtype")}
        mask = make_token_mask(mask_function, segment_ids=segment_ids, q_length=q_length, **arguments)
        if mask is not None:
            return mask
    if segment_ids is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(segment_ids))
    # Upstream leaves the mask out where it finds nothing masked, which it reads from the device.
    settings = {**kwargs, "q_length": q_length, "allow_is_bidirectional_skip": False}
    return eager_mask(mask_function=mask_function, **settings)


def _static_sdpa_mask(
    *, mask_function, q_offset: int | torch.Tensor = 0, kv_offset: int = 0, **kwargs
) -> torch.Tensor:
    if _segments[-1] is not None:
        mask_function = and_masks(mask_function, packed_sequence_mask_function(_segments[-1]))
    # Upstream leaves the mask out where it finds nothing masked, which it reads from the device.
    settings = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(mask_function=mask_function, q_offset=q_offset, kv_offset=kv_offset, **settings)
    # Each token attends to itself, those of padding too: a row with nothing to attend to is NaN in some kernels, and its
    # gradient is NaN in all rows.
    queries, keys = (
        torch.arange(size, device=mask.device) + offset
        for size, offset in zip(mask.shape[-2:], (q_offset, kv_offset), strict=True)
    )
    return mask | (queries[:, None] == keys)


@contextmanager
def static_masks(segment_ids: torch.Tensor | None = None, sdpa: bool = False) -> Iterator[None]:
    """
    Within this context, models with eager attention or one of this package's, and with `sdpa` those with SDPA, build their attention masks in a static
    shape and without reading the device.

    With `segment_ids` of shape `(batch, length)`, the number of each token's document and 0 for padding, tokens attend
    only within their own document (block-diagonal), on top of whatever pattern the model asks for (causal, sliding
    window). The mask is made once per forward pass by transformers' own mask functions; only the entries that they
    look up for it are replaced meanwhile. Within another such context, the inner one's hold.
    """
    with _masks_replaced(sdpa) if not _segments else nullcontext():
        _segments.append(segment_ids)
        try:
            yield
        finally:
            _segments.pop()


@contextmanager
def _masks_replaced(sdpa: bool) -> Iterator[None]:
    functions = {name: partial(mask_each_row, partial(_static_mask, name)) for name in ("eager", *_IMPLEMENTATIONS)}
    if sdpa:
        functions["sdpa"] = _static_sdpa_mask
    ALL_MASK_ATTENTION_FUNCTIONS.update(functions)
    try:
        # Upstream asks this before it reads a mask to leave it out, as that of recurrent layers, which models make by a function that
        # has no entry to replace.
        with temporarily(masking_utils, is_tracing=lambda tensor=None: True):
            yield
    finally:
        for name in functions:
            del ALL_MASK_ATTENTION_FUNCTIONS[name]
