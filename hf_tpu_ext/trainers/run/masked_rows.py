"""Whether a loss leaves out rows that are masked: then they can be added to a last batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...formatting import dtype_name
from .index_ranges import classes_for


#: Models of transformers whose loss is a cross-entropy over the labels that are not -100: one for each token...
_TOKEN_MODELS = classes_for("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")
#: ... or one for each row, if they are classes.
_ROW_MODELS = classes_for("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION")


def why_model_counts_tokens(model: nn.Module) -> str | None:
    """Why the loss that a model computes by itself may count tokens that are masked, as a clause."""
    name = type(model).__name__
    if name not in _TOKEN_MODELS | _ROW_MODELS or "_loss_function" in vars(model):
        return f"the loss of {name} may count masked tokens"
    for key, value in model.config.to_dict().items():
        if "z_loss" in key and value:
            return f"{key}={value} counts every token of a batch"
    return None


def why_targets_count(model: nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Why the targets of a batch may not be left out when they are masked, as a clause."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return "its targets are not in `labels`" if model.training else None
    if labels.is_floating_point():
        return f"no value of `labels` ({dtype_name(labels.dtype)}) is ignored by the loss"
    others = [key for key in batch if "label" in key and key not in ("labels", "shift_labels")]
    if others:
        return f"the loss may count masked values of `{others[0]}`"
    per_row = type(model).__name__ in _ROW_MODELS
    if labels.ndim != (1 if per_row else 2):
        return f"the loss may count masked `labels` of shape {tuple(labels.shape)}"
    if per_row and (
        model.config.num_labels == 1 or model.config.problem_type not in (None, "single_label_classification")
    ):
        return "regression: no value of `labels` is ignored by the loss"
    return None
