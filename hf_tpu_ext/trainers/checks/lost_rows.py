"""What upstream does not say of the rows of a dataset that it prepares: what `max_length` takes from them, and which say nothing."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import TrainingArguments
from trl import SFTConfig

from .rows import name_rows


# Columns of tokens, each of which is a sequence, behind the prompt if there are `prompt_ids`.
_SEQUENCES = ("input_ids", "chosen_ids", "rejected_ids", "completion_ids")
# Rows that are read together.
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


def describe_empty_answers(dataset: datasets.Dataset, name: str) -> list[str]:
    """A line on the rows of the `name` dataset in which the assistant says nothing, which upstream trains on; none if there are none."""
    names = {*dataset.column_names}
    columns = {"completion"} if "prompt" in names else {"messages", "conversations"}
    rows: list[int] = []
    for column in columns & names if "input_ids" not in names else ():
        start = 0
        for table in dataset.with_format("arrow", columns=[column]).iter(_ROWS):
            rows += [start + row for row in _empty_answers(table[column].combine_chunks())]
            start += len(table)
    if not rows:
        return []
    return [
        f"{len(rows):,} of {len(dataset):,} rows of the {name} dataset have an empty answer ({name_rows(rows)}; the first is row 0), from "
        "which a model learns to answer nothing. Correct this in the file, or, in Python, leave such rows out with dataset.filter"
    ]


def _sequence_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Number of tokens of each sequence, of shape `(sequences of a row, rows)`. It is read from where lists begin, not from tokens."""
    columns = [name for name in _SEQUENCES if name in dataset.column_names]
    prompts = [name for name in ("prompt_ids",) if name in dataset.column_names]
    parts = []
    for table in dataset.with_format("arrow", columns=[*columns, *prompts]).iter(batch_size=_ROWS):
        of_prompts = sum(pc.list_value_length(table[name]).to_numpy() for name in prompts)
        parts.append(np.stack([pc.list_value_length(table[name]).to_numpy() + of_prompts for name in columns]))
    return np.concatenate(parts, 1)


def _empty_answers(values: pa.Array) -> list[int]:
    """The rows, of a column of text or of messages, that have an answer without a character other than spaces."""
    if _is_text(values):
        return pc.indices_nonzero(_is_blank(values)).to_pylist()
    if not pa.types.is_list(values.type) or not pa.types.is_struct(values.type.value_type):
        return []
    messages = pc.list_flatten(values)
    fields = dict(zip(messages.type.names, messages.flatten(), strict=True))
    role, content = (fields.get(key, fields.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if role is None or content is None or not _is_text(role) or not _is_text(content):
        return []
    is_empty = pc.and_(pc.is_in(role, pa.array(["assistant", "gpt"], role.type)), _is_blank(content))
    if (calls := fields.get("tool_calls")) is not None:
        has_calls = pc.greater(pc.list_value_length(calls), 0) if pa.types.is_list(calls.type) else calls.is_valid()
        is_empty = pc.and_not(is_empty, pc.fill_null(has_calls, False))
    return pc.unique(pc.list_parent_indices(values).filter(is_empty)).to_pylist()


def _is_text(values: pa.Array) -> bool:
    return pa.types.is_string(values.type) or pa.types.is_large_string(values.type)


def _is_blank(texts: pa.Array) -> pa.Array:
    return pc.fill_null(pc.or_(pc.equal(texts, ""), pc.utf8_is_space(texts)), True)
