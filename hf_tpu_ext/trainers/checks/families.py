"""Families of models whose code cannot run in programs of static shape."""

from torch import nn
from transformers import PreTrainedModel

from ...errors import UserError


#: By the type of a model: why not. Each was tried, see tests/models/families.py.
REFUSED = {
    "cpmant": "it sees padding as tokens, so the lengths that batches are padded to would change its numbers",
}


def check_family(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model that would crash on XLA, or train wrongly."""
    if isinstance(model, PreTrainedModel) and (reason := REFUSED.get(model.config.model_type)) is not None:
        raise UserError(
            f"{type(model).__name__} does not train on XLA: {reason}. Train it on a GPU, or on the CPU with use_cpu=True."
        )
