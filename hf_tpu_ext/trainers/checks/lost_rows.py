"""What `max_length` takes from the rows of a dataset when upstream prepares it, which upstream does not say."""

import datasets
import numpy as np
import pyarrow.compute as pc
from transformers import TrainingArguments
from trl import SFTConfig


# Columns of tokens, each of which is a sequence, behind the prompt if there are `prompt_ids`.
_SEQUENCES = ("input_ids", "chosen_ids", "rejected_ids", "completion_ids")
# Rows of which the lengths are read together.
_ROWS = 10_000


def describe_lost(
    whole: datasets.Dataset, prepared: datasets.Dataset, name: str, args: SFTConfig, packing: bool
) -> list[str]:
    """Lines on what the rows of a `whole` dataset, of which tokens are made, lose until it is `prepared` for fine-tuning."""
    lines = describe_cut(whole, name, args, packing)
    if packing:
        # None is left out, and several are one.
        return lines
    why = f"nothing of them is left to train on with max_length={args.max_length}"
    return lines + describe_left_out(
        len(whole), len(prepared), name, why if lines else "none of their tokens has a label"
    )


def describe_cut(dataset: datasets.Dataset, name: str, args: TrainingArguments, packing: bool = False) -> list[str]:
    """
    A line on the rows of the `name` dataset that are longer than `max_length`, and on how many tokens these lose; none if no row
    is. The dataset still has all tokens, and with `packing` its rows are those to be packed.
    """
    # The other strategies go on in the next row.
    is_cut = args.max_length is not None and not (packing and args.packing_strategy != "bfd")
    if not is_cut or not len(dataset):
        return []
    lengths = _sequence_lengths(dataset)
    beyond = np.maximum(lengths - args.max_length, 0)
    cut, lost, tokens = np.count_nonzero(beyond.any(0)), beyond.sum(), lengths.sum()
    if not cut:
        return []
    end = "beginning" if not packing and vars(args).get("truncation_mode") == "keep_end" else "end"
    fix = "max_length or packing_strategy='bfd_split'" if packing else "max_length"
    return [
        f"{cut:,} of {len(dataset):,} rows of the {name} dataset are longer than max_length={args.max_length} and lose their {end}, "
        f"{lost:,} of all {tokens:,} tokens ({lost / tokens:.0%}): the longest has {lengths.max():,}. A higher {fix} keeps them"
    ]


def describe_left_out(rows: int, left: int, name: str, why: str) -> list[str]:
    """A line on the rows of the `name` dataset that upstream leaves out; none if all are left."""
    return [f"{rows - left:,} of {rows:,} rows of the {name} dataset are left out: {why}"] if left < rows else []


def _sequence_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Number of tokens of each sequence, of shape `(sequences of a row, rows)`. It is read from where lists begin, not from tokens."""
    columns = [name for name in _SEQUENCES if name in dataset.column_names]
    prompts = [name for name in ("prompt_ids",) if name in dataset.column_names]
    parts = []
    for table in dataset.with_format("arrow", columns=[*columns, *prompts]).iter(batch_size=_ROWS):
        of_prompts = sum(pc.list_value_length(table[name]).to_numpy() for name in prompts)
        parts.append(np.stack([pc.list_value_length(table[name]).to_numpy() + of_prompts for name in columns]))
    return np.concatenate(parts, 1)
