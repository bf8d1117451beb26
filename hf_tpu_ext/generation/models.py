"""Refuses models that cannot generate in programs of static shape."""

import inspect
from collections.abc import Collection

from peft import PeftModel
from torch import nn
from transformers.trainer_utils import unwrap_peft_model

from ..errors import UserError
from ..step.index_tables import Positions, known_model, learned_positions, token_embedding


_TYPES_OF_LAYERS = {"full_attention", "sliding_attention"}
# By the type of their configuration: some go by the length of the cache, which is static here, and have other tokens (gpt_neo, moshi);
# some read how much of it is filled, which ends the process in a loop of a program (xglm, mpt, roformer, trocr); layers of gemma3n share it,
# and mllama's keep images in it.
_OTHER_CACHES = set(
    "cpmant gemma3n_text git gpt_neo mllama_text_model moshi mpt prophetnet roformer trocr xglm xlm".split()
)


def cache_argument(model: nn.Module) -> str | None:
    """The argument that takes keys and values: `cache`, or `past_key_values` before transformers 5.24."""
    return next((name for name in ("cache", "past_key_values") if name in takes(model)), None)


def takes(model: nn.Module) -> Collection[str]:
    """The names of the arguments of a model."""
    return inspect.signature(model.forward).parameters.keys()


def read_tables(model: nn.Module) -> tuple[int | None, Positions | None]:
    """How many rows a model has for tokens, and its learned positions; `None` where that is not known, or there are none."""
    known = known_model(model)
    tokens = None if known is None else token_embedding(known, known)
    return (None, None) if tokens is None else (tokens.num_embeddings, learned_positions(known, tokens))


def check_model(model: nn.Module) -> None:
    """Refuse models whose state between two tokens is not keys and values alone, or to which padding is text (`ValueError`)."""
    plain = unwrap_peft_model(model)
    config, positions = plain.config, read_tables(plain)[1]
    text_config = config.get_text_config(decoder=True)
    # Of many, a property or another name of an attribute.
    other = sorted(set(getattr(text_config, "layer_types", None) or ()) - _TYPES_OF_LAYERS)
    reason = None
    if config.is_encoder_decoder:
        reason = "is an encoder and a decoder"
    elif other:
        reason = f"has layers of type {', '.join(other)}"
    elif text_config.model_type in _OTHER_CACHES:
        reason = "computes with a cache of another form"
    elif positions is not None and positions.counts_columns and "position_ids" not in takes(plain):
        reason = f"takes the column of a token, that of padding before it counted, for its position ({positions.name})"
    elif cache_argument(plain) is None:
        reason = "takes neither `cache` nor `past_key_values`"
    elif isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        reason = f"has an adapter of type {model.active_peft_config.peft_type.value}, which adds to prompts"
    if reason is not None:
        raise UserError(
            f"{type(plain).__name__} {reason}, which cannot generate in programs of static shape. Allowed are "
            "decoders with full or sliding attention, with LoRA or without. Generate with the model on CPU or CUDA."
        )
