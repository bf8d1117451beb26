"""What upstream does not say of the rows of a dataset that it prepares: what `max_length` takes from them, and which teach no answer."""

from collections.abc import Iterable, Iterator

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import TrainingArguments
from trl import SFTConfig

from .messages import ROWS_AT_ONCE, read_column
from .rows import FIRST_ROW, name_rows, quote_row


# Columns of tokens, each of which is a sequence, behind the prompt if there are `prompt_ids`.
_SEQUENCES = ("input_ids", "chosen_ids", "rejected_ids", "completion_ids")
# Names of the assistant in data from elsewhere.
_SHAREGPT = ["gpt", "bot", "chatgpt"]
_EMPTY = "have an empty answer ({rows}), {of_empty}"
_LEARNED = "from which a model learns to answer nothing"
_EVALUATED = "which the loss of an evaluation takes for the right one"
_OTHER_ROLE = (
    "have answers of another role than 'assistant', such as 'gpt' ({rows}). Chat templates write that role as it is, but whoever generates "
    "asks for an answer of 'assistant'"
)
_QUESTION = "end with a message that is not the assistant's ({rows}), so that no answer follows"


def describe_lost(
    whole: datasets.Dataset, prepared: datasets.Dataset, name: str, args: SFTConfig, packing: bool
) -> list[str]:
    """Lines on what the rows of a `whole` dataset, of which tokens are made, lose until it is `prepared` for fine-tuning."""
    lines = describe_cut(whole, name, args, packing)
    if packing:
        # None is left out, and several are one.
        return lines
    within = f" within max_length={args.max_length}" if lines else ""
    return lines + describe_left_out(len(whole), len(prepared), name, f"none of their tokens{within} has a label")


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
    if args.max_length < 0:
        # As a slice takes it: so many tokens are left out at the end of each row.
        return [
            f"max_length={args.max_length} takes the last {-args.max_length:,} tokens from each of the {len(dataset):,} rows of the {name} "
            "dataset. A positive one is the length to keep"
        ]
    beyond = np.maximum(lengths - args.max_length, 0)
    cut, lost, tokens = np.count_nonzero(beyond.any(0)), beyond.sum(), lengths.sum()
    if not cut:
        return []
    end = "beginning" if not packing and vars(args).get("truncation_mode") == "keep_end" else "end"
    fix = "max_length or packing_strategy='bfd_split'" if packing else "max_length"
    return [
        f"{cut:,} of {len(dataset):,} rows of the {name} dataset are longer than max_length={args.max_length} and lose their {end}, "
        f"{lost:,} of all {tokens:,} tokens ({lost / tokens:.0%}): the longest has {lengths.max():,}. A higher {fix} keeps them, up "
        "to the model's positions"
    ]


def describe_left_out(rows: int, left: int, name: str, why: str) -> list[str]:
    """A line on the rows of the `name` dataset that upstream leaves out; none if all are left."""
    return [f"{rows - left:,} of {rows:,} rows of the {name} dataset are left out: {why}"] if left < rows else []


def describe_answers(dataset: datasets.Dataset, name: str, columns: Iterable[str]) -> list[str]:
    """
    Lines on the rows of the `name` dataset whose answers upstream trains on and nobody wants: an empty one, a role that no template
    generates for, or none behind a question. The `columns` that it has end with an answer.
    """
    rows_of: dict[str, set[int]] = {}
    for column in {*columns} & {*dataset.column_names}:
        for start, values in read_column(dataset, column):
            for problem, rows in _problems(values):
                rows_of.setdefault(problem, set()).update(start + row for row in rows)
    lines = []
    for problem, of_problem in rows_of.items():
        if of_problem:
            rows = sorted(of_problem)
            named = problem.format(
                rows=f"{name_rows(rows)}; {FIRST_ROW}",
                of_empty=_LEARNED if name == "train" else _EVALUATED,
            )
            lines.append(
                f"{len(rows):,} of {len(dataset):,} rows of the {name} dataset {named}. {quote_row(dataset, rows[0])} Correct this in the "
                "file, or, in Python, leave such rows out with dataset.filter"
            )
    return lines


def _sequence_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """Number of tokens of each sequence, of shape `(sequences of a row, rows)`. It is read from where lists begin, not from tokens."""
    columns = [name for name in _SEQUENCES if name in dataset.column_names]
    prompts = [name for name in ("prompt_ids",) if name in dataset.column_names]
    parts = []
    for table in dataset.with_format("arrow", columns=[*columns, *prompts]).iter(ROWS_AT_ONCE):
        of_prompts = sum(pc.list_value_length(table[name]).to_numpy() for name in prompts)
        parts.append(np.stack([pc.list_value_length(table[name]).to_numpy() + of_prompts for name in columns]))
    return np.concatenate(parts, 1)


def _problems(values: pa.Array) -> Iterator[tuple[str, list[int]]]:
    """What is odd in a column of text or of messages, with `{rows}` to be filled in, and the numbers of the rows."""
    if _is_text(values):
        yield _EMPTY, pc.indices_nonzero(_is_blank(values)).to_pylist()
        return
    if not pa.types.is_list(values.type) or not pa.types.is_struct(values.type.value_type):
        return
    messages, rows = pc.list_flatten(values), pc.list_parent_indices(values)
    fields = dict(zip(messages.type.names, messages.flatten(), strict=True))
    role, content = (fields.get(key, fields.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if role is None or content is None or not _is_text(role) or not _is_text(content):
        return
    calls = pa.scalar(False)
    if (column := fields.get("tool_calls")) is not None:
        calls = pc.greater(pc.list_value_length(column), 0) if pa.types.is_list(column.type) else column.is_valid()
    is_answer = pc.is_in(role, pa.array(["assistant", *_SHAREGPT], role.type))
    is_empty = pc.and_not(pc.and_(is_answer, _is_blank(content)), pc.fill_null(calls, False))
    yield _EMPTY, pc.unique(rows.filter(is_empty)).to_pylist()
    yield _OTHER_ROLE, pc.unique(rows.filter(pc.is_in(role, pa.array(_SHAREGPT, role.type)))).to_pylist()
    numbers = rows.to_numpy()
    is_last = np.append(numbers[1:] != numbers[:-1], True)[: len(numbers)]
    is_question = pc.is_in(role, pa.array(["system", "user", "human"], role.type)).to_numpy(zero_copy_only=False)
    yield _QUESTION, numbers[is_last & is_question].tolist()


def _is_text(values: pa.Array) -> bool:
    return pa.types.is_string(values.type) or pa.types.is_large_string(values.type)


def _is_blank(texts: pa.Array) -> pa.Array:
    return pc.fill_null(pc.or_(pc.equal(texts, ""), pc.utf8_is_space(texts)), True)
