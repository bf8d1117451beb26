"""
Values of a batch that are places in tables of the model: token ids, positions, classes. XLA clamps those that lie outside of a
table, and a run would train on other numbers without a word; eager PyTorch raises an IndexError.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ...data.static_shapes import CollatedBatch, as_collated
from ...errors import UserError
from ...step.running_code import is_known
from ..checks.families import classes_for


_VOCABULARY_MODELS = classes_for("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_CLASS_MODELS = classes_for(
    "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"
)
_CHOICE_MODELS = classes_for("MULTIPLE_CHOICE")
# Names that transformers' models have for a table of learned positions.
_POSITIONS = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# What keys with token ids end in.
_TOKENS = ("input_ids", "prompt_ids", "completion_ids")
_MARK = "Mark what the loss is to leave out with -100"


class Table(NamedTuple):
    """The table that a column of a batch has places in."""

    size: int
    #: What a place is, e.g. `"the token id"`.
    place: str
    #: How many there are, e.g. `"the model's embedding has 64 rows"`.
    limit: str
    #: What to do about a place that is not in it.
    fix: str
    #: Whether the loss leaves places of -100 out.
    ignores: bool = False


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


class IndexRanges:
    """
    Holds batches on the host against the tables of a model, where these are known: of models of transformers.

    `labels` says whether those of a batch are of the model's own loss, and `truncation` is the setting that rows are truncated by,
    as one types it, with `{}` for the length.
    """

    def __init__(self, model: nn.Module, labels: bool, truncation: str = "max_length={}"):
        self._tables: dict[str, Table] = {}
        self._positions: dict[str, Positions] = {}
        self._truncation = truncation
        # Whether a label is the class of one of several choices, of which each batch has its own number.
        self._counts_choices = False
        model = unwrap_peft_model(model)
        if isinstance(model, PreTrainedModel) and is_known(type(model).__module__):
            self._note_embeddings(model)
            if labels and "_loss_function" not in vars(model):
                self._note_labels(model)

    def _note_embeddings(self, model: PreTrainedModel) -> None:
        sides = {"input_ids": model} if model.main_input_name == "input_ids" else {}
        if model.config.is_encoder_decoder:
            sides = {key: model.get_encoder() for key in sides} | {"decoder_input_ids": model.get_decoder()}
        for key, side in sides.items():
            tokens = _token_embedding(side)
            if tokens is None or _has_ids_beyond(model, tokens.num_embeddings):
                continue
            self._tables[key] = Table(
                tokens.num_embeddings,
                "the token id",
                f"the model's embedding has {tokens.num_embeddings} rows",
                "Give it a row for each token: model.resize_token_embeddings(len(tokenizer))",
            )
            for parent in side.modules():
                children = dict(parent.named_children())
                if any(
                    isinstance(child, nn.Embedding) and child.weight is tokens.weight for child in children.values()
                ):
                    self._note_beside(key, children)

    def _note_beside(self, key: str, children: Mapping[str, nn.Module]) -> None:
        """Note what is added to the embedding of a token."""
        for name in _POSITIONS:
            table = children.get(name)
            # A table with this method is made anew for longer rows.
            grows = any("make_weight" in vars(cls) for cls in type(table).__mro__)
            if isinstance(table, nn.Embedding) and not grows:
                # RoBERTa's positions come behind that of its padding, those of BART and OPT behind two that are unused.
                padding = table.padding_idx
                first = vars(table).get("offset", 0) if padding is None else padding + 1
                skips_masked = type(table).__name__.startswith("OPT")
                self._positions[key] = Positions(table.num_embeddings - first, name, padding, skips_masked)
        types = children.get("token_type_embeddings")
        if key == "input_ids" and isinstance(types, nn.Embedding):
            size = types.num_embeddings
            self._tables["token_type_ids"] = Table(
                size,
                "the token type",
                f"the model has {size} (config.type_vocab_size)",
                "Number the parts of a row from 0, or leave token_type_ids out",
            )

    def _note_labels(self, model: PreTrainedModel) -> None:
        name, config = type(model).__name__, model.config
        self._counts_choices = name in _CHOICE_MODELS
        if name in _VOCABULARY_MODELS:
            size = config.get_text_config(decoder=True).vocab_size
            table = Table(size, "the label", f"the model's vocabulary has {size} tokens", _MARK, ignores=True)
            self._tables |= {"labels": table, "shift_labels": table}
        elif (
            name in _CLASS_MODELS
            and config.num_labels > 1
            and config.problem_type in (None, "single_label_classification")
        ):
            self._tables["labels"] = Table(
                config.num_labels,
                "the label",
                f"the model has {config.num_labels} classes",
                f"Load it with as many classes as there are (num_labels=...), count them from 0, and {_MARK[0].lower()}{_MARK[1:]}",
                ignores=True,
            )

    @property
    def positions(self) -> int | None:
        """How many tokens of a row the model has learned positions for, if it has such a table."""
        return self._positions["input_ids"].size if "input_ids" in self._positions else None

    def check(self, batch: Mapping[str, Any]) -> None:
        """
        Refuse (`ValueError`) a batch on the host that has a place outside of a table. What a collator of this package has added
        is not looked at.
        """
        collated_batch = as_collated(batch)
        for key, values in collated_batch.items():
            if not isinstance(values, Tensor) or values.device.type != "cpu":
                continue
            if values.is_floating_point() or not values.numel():
                continue
            table = self._table_of(key, batch)
            if table is not None:
                _check_values(key, values, table)
        for key in self._positions:
            self._check_positions(key, collated_batch, counts_columns=isinstance(batch, CollatedBatch))

    def _table_of(self, key: str, batch: Mapping[str, Any]) -> Table | None:
        if key in self._tables:
            return self._tables[key]
        if key == "labels" and self._counts_choices and "input_ids" in batch:
            size = batch["input_ids"].shape[1]
            return Table(size, "the label", f"a row has {size} choices", _MARK, ignores=True)
        # A batch may have token ids of several sequences, as `chosen_input_ids`, or of a prompt and its completion.
        return self._tables.get("input_ids") if key.endswith(_TOKENS) and key != "decoder_input_ids" else None

    def _check_positions(self, key: str, batch: Mapping[str, Any], counts_columns: bool) -> None:
        positions = self._positions[key]
        if key == "input_ids" and isinstance(batch.get("position_ids"), Tensor):
            limit = f"the model has {positions.size} ({positions.name})"
            table = Table(
                positions.size, "the position", limit, f"Truncate the rows: {self._truncation.format(positions.size)}"
            )
            _check_values("position_ids", batch["position_ids"], table)
            return
        # Models make a decoder's of the labels.
        ids = batch.get(key, batch.get("labels") if key == "decoder_input_ids" else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] <= positions.size:
            return
        mask = batch.get(key.replace("input_ids", "attention_mask"))
        has_position = torch.ones_like(ids)
        if positions.padding is not None:
            has_position = ids != positions.padding
        elif isinstance(mask, Tensor) and mask.ndim == 2 and (positions.skips_masked or not counts_columns):
            # Columns that nobody knows the origin of may be padding that stock does not have.
            has_position = mask != 0
        most, row = has_position.sum(1).max(0)
        if most > positions.size:
            raise UserError(
                f"Row {row} of the batch has {most} tokens, but the model has positions for {positions.size} ({positions.name}). "
                f"Truncate the rows: {self._truncation.format(positions.size)}."
            )


def _check_values(key: str, values: Tensor, table: Table) -> None:
    # NumPy takes half as long as PyTorch, and this is on the way of every batch.
    values = values.numpy()
    if values.max() < table.size and values.min() >= 0:
        return
    outside = (values >= table.size) | (values < 0)
    if table.ignores:
        outside &= values != -100
    if outside.any():
        place = np.argwhere(outside)[0]
        raise UserError(
            f"Row {place[0]} of the batch holds {table.place} {values[tuple(place)]} in `{key}`, but {table.limit}: 0 to "
            f"{table.size - 1}. {table.fix}."
        )


def _token_embedding(model: nn.Module) -> nn.Embedding | None:
    """The table of token embeddings, where the ids of a batch are places in it."""
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return None
    if not isinstance(embedding, nn.Module):
        return None
    table = next((module for module in embedding.modules() if isinstance(module, nn.Embedding)), None)
    # A hook or code of the user's may change the ids.
    is_unknown = table is None or table._forward_pre_hooks or not is_known(type(embedding).__module__)
    return None if is_unknown else table


def _has_ids_beyond(model: PreTrainedModel, size: int) -> bool:
    """Whether a token that stands for an image or a sound has no row of its own, by the model's config."""
    ids = (value for key, value in model.config.to_dict().items() if key.endswith(("token_id", "token_index")))
    return model.config.get_text_config() is not model.config and any(
        isinstance(value, int) and value >= size for value in ids
    )
