"""Families of models that do not train in programs of static shape, or not on packed rows."""

from torch import nn
from transformers import PreTrainedModel

from ...errors import UserError
from ...layers.attention import carries_state


_PADDING = "it sees padding as tokens, so the lengths that batches are padded to would change its numbers"
#: By the type of a model, or by its class where others of the type train: why not. Each was tried, see tests/models/families.py.
REFUSED = dict.fromkeys(
    (
        "canine",
        "convbert",
        "cpmant",
        "fnet",
        "mobilebert",
        "nystromformer",
        "yoso",
        "ProphetNetForCausalLM",
        "T5GemmaForSequenceClassification",
        "T5Gemma2ForSequenceClassification",
        "XLNetForSequenceClassification",
    ),
    _PADDING,
)

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


def check_family(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model that would crash on XLA, or train wrongly."""
    name = type(model).__name__
    if isinstance(model, PreTrainedModel) and (reason := REFUSED.get(name, REFUSED.get(model.config.model_type))):
        raise UserError(f"{name} does not train on XLA: {reason}. Train it on a GPU, or on the CPU with use_cpu=True.")
