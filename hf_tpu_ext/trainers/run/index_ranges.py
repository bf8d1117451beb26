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

from ...data.static_shapes import CollatedBatch, as_collated
from ...errors import UserError
from ...step.index_tables import MORE_ROWS, Positions, known_model, learned_positions, modules_beside, token_embedding
from ..checks.families import classes_for


_VOCABULARY_MODELS = classes_for("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_CLASS_MODELS = classes_for(
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
)
_CHOICE_MODELS = classes_for("MULTIPLE_CHOICE")
# Tables beside that of tokens, by their name in the model: the key of a batch that has places in one, what such a place is called, the
# setting of the table's size, and what to do about a place outside.
_BESIDE_TOKENS = {
    "token_type_embeddings": (
        "token_type_ids",
        "the token type",
        "type_vocab_size",
        "Number the parts of a row from 0, or leave token_type_ids out",
    ),
    "x_position_embeddings": (
        "bbox",
        "the coordinate",
        "max_2d_position_embeddings",
        "Scale boxes to 0 to 1000, whatever the size of the page: int(1000 * x / width)",
    ),
    "lang_embeddings": ("langs", "the language", "n_langs", "Number languages from 0"),
}
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
    #: The place that the loss leaves out.
    ignored: int | None = None


class IndexRanges:
    """
    Holds batches on the host against the tables of a model, where these are known: of models of transformers.

    `labels` says whether those of a batch are of the model's own loss, and `truncation` is the setting that rows are truncated by,
    as one types it, with `{}` for the length. Messages call the model by its `name`, and say by `more_rows` what to do about a token
    that it has no row for.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: bool,
        truncation: str = "max_length={}",
        name: str = "the model",
        more_rows: str = MORE_ROWS,
    ):
        self._name, self._more_rows = name, more_rows
        self._tables: dict[str, Table] = {}
        self._positions: dict[str, Positions] = {}
        self._truncation = truncation
        # Whether a label is the class of one of several choices, of which each batch has its own number.
        self._counts_choices = False
        if (known := known_model(model)) is not None:
            self._note_embeddings(known)
            if labels and "_loss_function" not in vars(known):
                self._note_labels(known)

    def _note_embeddings(self, model: PreTrainedModel) -> None:
        sides = {"input_ids": model} if model.main_input_name == "input_ids" else {}
        if model.config.is_encoder_decoder:
            sides = {key: model.get_encoder() for key in sides} | {"decoder_input_ids": model.get_decoder()}
        for key, side in sides.items():
            if (tokens := token_embedding(model, side)) is None:
                continue
            self._tables[key] = Table(
                tokens.num_embeddings,
                "the token id",
                f"{self._name}'s embedding has {tokens.num_embeddings} rows",
                self._more_rows,
            )
            if (positions := learned_positions(side, tokens)) is not None:
                self._positions[key] = positions
            if key == "input_ids":
                for children in modules_beside(side, tokens):
                    self._note_beside(children)

    def _note_beside(self, children: Mapping[str, nn.Module]) -> None:
        """Note the tables of what else has an embedding for each token."""
        for name, (key, place, setting, fix) in _BESIDE_TOKENS.items():
            if isinstance(table := children.get(name), nn.Embedding):
                size = table.num_embeddings
                self._tables[key] = Table(size, place, f"{self._name} has {size} (config.{setting})", fix)

    def _note_labels(self, model: PreTrainedModel) -> None:
        name, config = type(model).__name__, model.config
        self._counts_choices = name in _CHOICE_MODELS
        if name in _VOCABULARY_MODELS:
            size = config.get_text_config(decoder=True).vocab_size
            table = Table(size, "the label", f"the model's vocabulary has {size} tokens", _MARK, ignored=-100)
            self._tables |= {"labels": table, "shift_labels": table}
        elif (
            name in _CLASS_MODELS
            and config.num_labels > 1
            and config.problem_type in (None, "single_label_classification")
        ):
            # Models of images have a number of their own for pixels without a class.
            ignored = config.to_dict().get("semantic_loss_ignore_index", -100)
            mark = f"mark what the loss is to leave out with {ignored}"
            self._tables["labels"] = Table(
                config.num_labels,
                "the label",
                f"the model has {config.num_labels} classes",
                f"Load it with as many classes as there are (num_labels=...), count them from 0, and {mark}",
                ignored,
            )

    @property
    def learned_positions(self) -> Positions | None:
        """The table of learned positions that the tokens of a row have places in, if the model has one."""
        return self._positions.get("input_ids")

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
            return Table(size, "the label", f"a row has {size} choices", _MARK, ignored=-100)
        if key == "labels" and "decoder_input_ids" in self._tables and "decoder_input_ids" not in batch:
            # The decoder takes them for its tokens.
            return self._tables["decoder_input_ids"]._replace(place="the label", ignored=-100)
        # A batch may have token ids of several sequences, as `chosen_input_ids`, or of a prompt and its completion.
        return self._tables.get("input_ids") if key.endswith(_TOKENS) and key != "decoder_input_ids" else None

    def _check_positions(self, key: str, batch: Mapping[str, Any], counts_columns: bool) -> None:
        positions = self._positions[key]
        if key == "input_ids" and isinstance(batch.get("position_ids"), Tensor):
            limit = f"{self._name} has {positions.size} ({positions.name})"
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
                f"Row {row} of the batch has {most} tokens, but {self._name} has positions for {positions.size} ({positions.name}). "
                f"Truncate the rows: {self._truncation.format(positions.size)}."
            )


def _check_values(key: str, values: Tensor, table: Table) -> None:
    # NumPy takes half as long as PyTorch, and this is on the way of every batch.
    values = values.numpy()
    if values.max() < table.size and values.min() >= 0:
        return
    outside = (values >= table.size) | (values < 0)
    if table.ignored is not None:
        outside &= values != table.ignored
    if outside.any():
        place = np.argwhere(outside)[0]
        raise UserError(
            f"Row {place[0]} of the batch holds {table.place} {values[tuple(place)]} in `{key}`, but {table.limit}: 0 to "
            f"{table.size - 1}. {table.fix}."
        )
