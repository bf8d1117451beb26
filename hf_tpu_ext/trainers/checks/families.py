"""Families of models that do not train on padded rows, or not on packed ones."""

from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ...layers.attention import carries_state


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
