"""Families of models whose code cannot run in programs of static shape."""

from torch import nn
from transformers import PreTrainedModel

from ...errors import UserError


_EXPERTS = "its experts are computed one by one for the rows that the router sends to them, a new program at each step"
_QWEN4 = "its attention chooses blocks of tokens for each query in Python, by the data, a new program at each step"
#: By the type of a model: why not. Each was tried, see tests/models/families.py.
REFUSED = {
    "cpmant": "it sees padding as tokens, so the lengths that batches are padded to would change its numbers",
    "dbrx": _EXPERTS,
    "jetmoe": "its experts take as many rows as the router sends to them, which a program cannot know",
    "longcat_flash": _EXPERTS,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
}


def check_family(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model that would crash on XLA, or train wrongly."""
    if isinstance(model, PreTrainedModel) and (reason := REFUSED.get(model.config.model_type)) is not None:
        raise UserError(
            f"{type(model).__name__} does not train on XLA: {reason}. Train it on a GPU, or on the CPU with use_cpu=True."
        )
