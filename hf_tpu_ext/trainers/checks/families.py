"""Models that do not train on padded rows, on packed ones, or on rows that are added to a last batch and masked."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.trainer_utils import unwrap_peft_model

from ...formatting import dtype_name
from ...layers.attention import carries_state


def classes_for(*tasks: str) -> set[str]:
    """Names of the classes of transformers' models for some tasks, as the auto classes call these."""
    names: set[str] = set()
    for task in tasks:
        for entry in vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"].values():
            names.update([entry] if isinstance(entry, str) else entry)
    return names


#: By the type of a model, or by its class where others of the type do not: they see padding as tokens, as tests/models/families.py found.
SEES_PADDING = {
    "canine",
    "convbert",
    "cpmant",
    "fnet",
    "mobilebert",
    "nystromformer",
    "prophetnet",
    "reformer",
    "yoso",
    "FunnelForMaskedLM",
    "FunnelForQuestionAnswering",
    "FunnelForTokenClassification",
    "T5GemmaForSequenceClassification",
    "T5Gemma2ForSequenceClassification",
    "XLNetForSequenceClassification",
}

#: Their own masks or positions: documents of a packed row see each other, or are elsewhere than they are alone.
NOT_PACKED = {
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "blt",
    "camembert",
    "cpmant",
    "data2vec-text",
    "marian",
    "mbart",
    "mvp",
    "openai-gpt",
    "pegasus",
    "plbart",
    "prophetnet",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "trocr",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
}


# Models of transformers whose loss is a cross-entropy over the labels that are not -100: one for each token...
_TOKEN_MODELS = classes_for("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")
# ... or one for each row, if they are classes.
_ROW_MODELS = classes_for("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION")
# The loss of these is over the places of a row, of which those of padding are some.
_SPAN_MODELS = classes_for("QUESTION_ANSWERING")


def why_not_packed(model: nn.Module) -> str | None:
    """Why documents of a packed row would not be what they are alone; `None` if they are."""
    if carries_state(model):
        return "its layers carry a state over the row, from each document into the next"
    if isinstance(model, PreTrainedModel) and model.config.model_type in NOT_PACKED:
        return "it makes masks or positions of its own, which do not keep documents apart"
    return None


def class_that_sees_padding(model: nn.Module) -> str | None:
    """The class of a model to which padding is tokens, so that its numbers change with it; `None` where they do not."""
    model = unwrap_peft_model(model)
    name = type(model).__name__
    sees = isinstance(model, PreTrainedModel) and {name, model.config.model_type} & SEES_PADDING
    return name if sees else None


def predicts_spans(model: nn.Module) -> bool:
    """Whether a model predicts places of a row, by a softmax over all of its columns."""
    return type(unwrap_peft_model(model)).__name__ in _SPAN_MODELS


def why_model_counts_tokens(model: nn.Module) -> str | None:
    """Why the loss that a model computes by itself may count tokens that are masked, as a clause."""
    name = type(model).__name__
    if name not in _TOKEN_MODELS | _ROW_MODELS or "_loss_function" in vars(model):
        return f"the loss of {name} {'counts every row and column' if name in _SPAN_MODELS else 'may count masked tokens'}"
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
