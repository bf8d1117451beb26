"""Which lengths batches are padded to."""

from collections.abc import Sequence

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from transformers import TrainingArguments

from ...data.buckets import batch_lengths, percentile_buckets, round_up_length, validate_buckets
from ...errors import UserError
from ..checks.datasets import named_datasets
from ..configs import PaddedArguments


#: A single number in `length_buckets` up to this one is a count of buckets, not a length.
MOST_BUCKETS = 32
# Columns that have a value for each token, but are no sequence of their own.
_NOT_TOKENS = ("position_ids", "segment_ids", "token_type_ids")


def row_lengths(dataset, longest: int | None = None) -> list[int] | None:
    """
    Lengths of a prepared dataset's rows, as a trainer that truncates them to `longest` sees them; `None` where they
    are not known without going through the data.

    They are those of the `input_ids` column, or of `labels` where these are more, as an encoder-decoder model may have them; or of columns of completions that end in `_ids`, as `chosen_ids` and
    `rejected_ids`, of which the longest counts, behind the prompt if there are `prompt_ids`.
    """
    if not isinstance(dataset, datasets.Dataset) or not len(dataset):
        return None
    columns = [name for name in dataset.column_names if name.endswith("_ids") and name not in _NOT_TOKENS]
    if "input_ids" in columns:
        columns = ["input_ids"]
        labels = dataset.data.schema.field("labels").type if "labels" in dataset.column_names else None
        if labels is not None and pa.types.is_list(labels) and pa.types.is_integer(labels.value_type):
            columns.append("labels")
    if not columns:
        return None
    table = dataset.with_format("arrow", columns=columns)[:]
    # A mask tells whether a row holds several choices, as in `pad_columns`.
    choices = "attention_mask" in dataset.column_names and _is_nested(dataset.data.schema.field("attention_mask").type)
    lengths = {name: _lengths_of(table[name], choices) for name in columns}
    prompts = lengths.pop("prompt_ids", None)
    rows = pc.max_element_wise(*lengths.values()) if lengths else prompts
    if lengths and prompts is not None:
        rows = pc.add(rows, prompts)
    return (rows if longest is None else pc.min_element_wise(rows, longest)).to_pylist()


def share_of_tokens(rows: datasets.Dataset) -> float:
    """The share of the tokens of rows that are no padding, of which a tokenizer may have added some, by the masks of a thousand rows."""
    if "attention_mask" not in rows.column_names:
        return 1.0
    some = rows.with_format("arrow", columns=["attention_mask"])[range(0, len(rows), max(1, len(rows) // 1000))]
    masks = some["attention_mask"]
    while pa.types.is_list(masks.type):
        masks = pc.list_flatten(masks)
    return pc.mean(masks).as_py() if pa.types.is_integer(masks.type) else 1.0


def _is_nested(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_list(kind.value_type)


def _lengths_of(column: pa.ChunkedArray, choices: bool) -> pa.Array | pa.ChunkedArray:
    """Length of each row of a column, or of its longest choice."""
    if not (choices and _is_nested(column.type)):
        return pc.list_value_length(column)
    rows = column.combine_chunks()
    choice_lengths = pa.table({"row": pc.list_parent_indices(rows), "length": pc.list_value_length(rows.flatten())})
    return choice_lengths.group_by("row", use_threads=False).aggregate([("length", "max")])["length_max"]


def length_for(lengths: Sequence[int]) -> int:
    """What rows of these lengths are padded to: the longest, rounded up; those of one length need no pads at all."""
    longest = max(lengths)
    return longest if min(lengths) == longest else round_up_length(longest, longest + 128)


def longest_kept(args: TrainingArguments) -> int | None:
    """The length in tokens that a trainer truncates rows to; `None` where rows are taken as they are."""
    return None if isinstance(args, PaddedArguments) else vars(args).get("max_length")


def lengths_for(
    args: TrainingArguments,
    train_lengths: list[int] | None,
    train,
    eval_dataset,
    batch_size: int,
    positions: int | None = None,
) -> list[int]:
    """
    Decide the lengths that the batches of a trainer are padded to, from those of the rows of the training data, if
    known, and from the data. Returns distinct lengths, ascending; none where nothing is known, and batches keep what
    the collator gives them. Rows that fit into the `positions` of a model are not padded beyond them.
    """
    longest_row = longest_kept(args)
    eval_lengths = [
        length
        for rows in named_datasets({"eval_dataset": eval_dataset}).values()
        for length in row_lengths(rows, longest_row) or ()
    ]
    lengths = eval_lengths or None if train is None else train_lengths
    max_length, buckets = vars(args).get("max_length"), vars(args).get("length_buckets")
    if max_length is None and lengths is not None:
        max_length = length_for(lengths)
    if max_length is None and buckets:
        max_length = max(buckets)
    if max_length is None:
        # Whatever the collator yields; the first other shape is an error.
        return []
    declared_lengths = declare_lengths(buckets, max_length, lengths, batch_size, args.train_sampling_strategy)
    # Rows to evaluate on may be longer.
    longest = max(eval_lengths, default=0)
    if longest > declared_lengths[-1]:
        declared_lengths = [*declared_lengths, round_up_length(longest, longest + 128)]
    fits = positions is not None and lengths is not None and max(*lengths, longest) <= positions
    return sorted({min(length, positions) for length in declared_lengths}) if fits else declared_lengths


def declare_lengths(
    length_buckets: list[int] | None,
    max_length: int,
    train_lengths: list[int] | None,
    batch_size: int,
    train_sampling_strategy: str,
) -> list[int]:
    """
    Decide the lengths that batches are padded to. Returns distinct lengths, ascending.

    Without buckets it is the length of the longest row, rounded up, so that a `max_length` far above the data costs
    nothing. `max_length` itself is always among them, for rows that only an evaluation set has; a length that does not
    occur is never compiled. Buckets that are not usable, or that are to be chosen from data whose lengths are not
    known, are a `ValueError`.
    """
    if not length_buckets:
        fitting = [] if train_lengths is None else [round_up_length(max(train_lengths), max_length)]
        return sorted({*fitting, max_length})
    if len(length_buckets) == 1 and 0 < length_buckets[0] <= MOST_BUCKETS:
        if train_lengths is None:
            # Without a `max_length`, it is this number of buckets.
            longest = max_length if max_length > MOST_BUCKETS else 1024
            raise UserError(
                f"length_buckets={length_buckets[0]} chooses the lengths from the training data, whose lengths are not "
                "known (a streaming dataset). Give the lengths themselves, for example "
                f"length_buckets={[longest // 4, longest // 2, longest]}."
            )
        longest = batch_lengths(train_lengths, batch_size, train_sampling_strategy)
        return sorted({*percentile_buckets(longest, length_buckets[0], max_length), max_length})
    return sorted({*validate_buckets(length_buckets, max_length), max_length})
