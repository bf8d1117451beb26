"""
Models that save other weights than they have: `save_pretrained` writes the names of the Hub, and experts one by one, where
transformers has given them others. Upstream's trainer loads checkpoints by the names of the model, so it would go on from weights that
no checkpoint has.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def saves_other_weights(model: nn.Module) -> bool:
    """Whether a model saves its weights under other names than its own."""
    if not isinstance(model, PreTrainedModel):
        return False
    own = {name: torch.empty_like(value, device="meta") for name, value in model.state_dict(keep_vars=True).items()}
    return revert_weight_conversion(model, dict(own)).keys() != own.keys()


def load_other_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load a checkpoint of a model that [`saves_other_weights`], as `from_pretrained` does. float32 holds what any file has."""
    other = type(model).from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(other.state_dict())
