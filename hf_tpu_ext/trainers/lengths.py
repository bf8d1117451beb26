"""Which lengths batches are padded to, and with what."""

import datasets
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from ..data import batch_lengths, percentile_buckets, round_up_length, validate_buckets


#: A single number in `length_buckets` up to this one is a count of buckets, not a length.
MOST_BUCKETS = 32


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """
    The token that batches are padded with.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.

    Returns:
        `int`: Its pad token id.

    Raises:
        `ValueError`: It has none.
    """
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "The tokenizer has no pad token, and batches are padded to a fixed length on XLA. Set one, for example "
            "tokenizer.pad_token = tokenizer.eos_token, and pass it as processing_class=tokenizer."
        )
    return tokenizer.pad_token_id


def row_lengths(dataset) -> list[int] | None:
    """
    Lengths of a prepared dataset's rows.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset with an `input_ids` column.

    Returns:
        `list[int]` or `None`: One length per row; `None` where they are not known without going through the data.
    """
    if not isinstance(dataset, datasets.Dataset) or "input_ids" not in dataset.column_names or not len(dataset):
        return None
    column = dataset.with_format("arrow", columns=["input_ids"])[:]["input_ids"]
    return pc.list_value_length(column).to_pylist()


def declare_lengths(
    length_buckets: list[int] | None,
    max_length: int,
    train_lengths: list[int] | None,
    batch_size: int,
    train_sampling_strategy: str,
) -> list[int]:
    """
    Decide the lengths that batches are padded to.

    Without buckets it is the length of the longest row, rounded up, so that a `max_length` far above the data costs
    nothing. `max_length` itself is always among them, for rows that only an evaluation set has; a length that does not
    occur is never compiled.

    Args:
        length_buckets (`list[int]`, *optional*):
            As in [`ExtensionArguments`].
        max_length (`int`):
            Greatest length of a row.
        train_lengths (`list[int]`, *optional*):
            Row lengths of the training data, if known.
        batch_size (`int`):
            Rows of a batch.
        train_sampling_strategy (`str`):
            As in [`~transformers.TrainingArguments`].

    Returns:
        `list[int]`: Distinct lengths, ascending.

    Raises:
        `ValueError`: The buckets are not usable, or are to be chosen from data whose lengths are not known.
    """
    if not length_buckets:
        fitting = [] if train_lengths is None else [round_up_length(max(train_lengths), max_length)]
        return sorted({*fitting, max_length})
    if len(length_buckets) == 1 and 0 < length_buckets[0] <= MOST_BUCKETS:
        if train_lengths is None:
            raise ValueError(
                f"length_buckets={length_buckets[0]} chooses the lengths from the training data, whose lengths are not "
                "known (a streaming dataset). Give the lengths themselves, for example "
                f"length_buckets={[max_length // 4, max_length // 2, max_length]}."
            )
        longest = batch_lengths(train_lengths, batch_size, train_sampling_strategy)
        return sorted({*percentile_buckets(longest, length_buckets[0], max_length), max_length})
    return sorted({*validate_buckets(length_buckets, max_length), max_length})
