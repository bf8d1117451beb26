"""
The tables that a model of transformers looks tokens and positions up in. XLA clamps an index outside of a table, and what comes out
are other numbers without a word; eager PyTorch raises an IndexError.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from .running_code import is_known


# Names that transformers' models have for a table of learned positions.
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")


#: What to do about a token that the table of a model has no row for.
MORE_ROWS = "Give it a row for each token: model.resize_token_embeddings(len(tokenizer))"


class Positions(NamedTuple):
    """A table of learned positions."""

    #: How many tokens of a row have a position.
    size: int
    #: The name of the table in the model.
    name: str
    #: The token that has no position of its own.
    padding: int | None
    #: Whether tokens that are masked have no position of their own.
    skips_masked: bool

    @property
    def counts_columns(self) -> bool:
        """Whether a token's position is its column, that of padding before it counted."""
        return self.padding is None and not self.skips_masked


def known_model(model: nn.Module) -> PreTrainedModel | None:
    """The model inside adapters, if it is one of transformers' own classes."""
    model = unwrap_peft_model(model)
    return model if isinstance(model, PreTrainedModel) and is_known(type(model).__module__) else None


def token_embedding(model: PreTrainedModel, side: nn.Module) -> nn.Embedding | None:
    """The table of token embeddings of a model, or of its encoder or decoder, where the ids of a batch are places in it."""
    try:
        embedding = side.get_input_embeddings()
    except NotImplementedError:
        return None
    if not isinstance(embedding, nn.Module):
        return None
    table = next((module for module in embedding.modules() if isinstance(module, nn.Embedding)), None)
    # A hook or code of the user's may change the ids.
    is_unknown = table is None or table._forward_pre_hooks or not is_known(type(embedding).__module__)
    return None if is_unknown or _has_ids_beyond(model, table.num_embeddings) else table


def modules_beside(side: nn.Module, tokens: nn.Embedding) -> Iterator[dict[str, nn.Module]]:
    """The modules that are beside a table of token embeddings, by name: what they yield is added to the embedding of a token."""
    for parent in side.modules():
        children = dict(parent.named_children())
        if any(isinstance(child, nn.Embedding) and child.weight is tokens.weight for child in children.values()):
            yield children


def learned_positions(side: nn.Module, tokens: nn.Embedding) -> Positions | None:
    """The table of learned positions beside that of token embeddings, if there is one."""
    found = None
    for children in modules_beside(side, tokens):
        for name in _POSITIONS:
            table = children.get(name)
            # A table with this method is made anew for longer rows.
            grows = any("make_weight" in vars(cls) for cls in type(table).__mro__)
            if isinstance(table, nn.Embedding) and not grows:
                # RoBERTa's positions come behind that of its padding, those of BART and OPT behind two that are unused.
                padding = table.padding_idx
                first = vars(table).get("offset", 0) if padding is None else padding + 1
                skips_masked = type(table).__name__.startswith("OPT")
                found = Positions(table.num_embeddings - first, name, padding, skips_masked)
    return found


def _has_ids_beyond(model: PreTrainedModel, size: int) -> bool:
    """Whether a token that stands for an image or a sound has no row of its own, by the model's config."""
    ids = (value for key, value in model.config.to_dict().items() if key.endswith(("token_id", "token_index")))
    return model.config.get_text_config() is not model.config and any(
        isinstance(value, int) and value >= size for value in ids
    )
