"""Datasets that cannot work are refused before anything is loaded or compiled."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from transformers import TrainingArguments
from trl import SFTConfig

from ...errors import UserError
from ...vision.collator import IMAGE_COLUMNS
from .messages import first_row, keys_of, read_column
from .rows import TEXT_OR_MESSAGES, refusal_of_rows, rows_of_other_kind


_PAIR = ("prompt", "completion")
_PREFERENCES = ("chosen", "rejected")
_NEEDED = "'messages', 'prompt' and 'completion', 'conversations' (of messages with 'from' and 'value'), 'input_ids'"
_ROLES = ("system", "developer", "user", "assistant", "tool")


def named_datasets(owner: Mapping[str, Any]) -> dict[str, Any]:
    """
    The datasets among the arguments or attributes of a trainer, by what to call them in a message: `"train_dataset"`,
    `"eval_dataset['short']"`.
    """
    rows = owner.get("eval_dataset")
    eval_datasets = {f"[{key!r}]": dataset for key, dataset in rows.items()} if isinstance(rows, dict) else {"": rows}
    named = {"train_dataset": owner.get("train_dataset")}
    named |= {f"eval_dataset{key}": dataset for key, dataset in eval_datasets.items()}
    return {name: dataset for name, dataset in named.items() if dataset is not None}


def known_columns(dataset) -> list[str]:
    """The columns of a dataset; none where they are not known, as of some streams, and of types other than those of `datasets`."""
    has_columns = isinstance(dataset, (datasets.Dataset, datasets.IterableDataset))
    return (dataset.column_names or []) if has_columns else []


def has_images(dataset) -> bool:
    """Whether a dataset has a column of images."""
    is_stream = isinstance(dataset, datasets.IterableDataset)
    columns = known_columns(dataset) or (next(iter(dataset), {}) if is_stream else ())
    return not set(IMAGE_COLUMNS).isdisjoint(columns)


def check_has_rows(dataset, name: str) -> dict[str, Any]:
    """
    Check that a dataset has rows (`ValueError`). Returns the first, see [`first_row`]; an empty one for a dataset of another type, which
    is left to upstream. Messages call it `name`, see [`named_datasets`].
    """
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return {}
    if (first := first_row(dataset)) is None:
        raise UserError(f"{name} is empty: it has no rows. Check the split and the filters that made it.")
    return first


def check_messages(first: Mapping[str, Any], name: str, columns: Sequence[str]) -> None:
    """
    Check that columns that upstream makes tokens of are all text, or all messages with the keys that it reads (`ValueError`), by the
    `first` row of a dataset.
    """
    texts = [column for column in columns if isinstance(first.get(column), str)]
    messages = [column for column in columns if keys_of(first.get(column))]
    if texts and messages:
        raise UserError(
            f"{texts[0]!r} of {name} is text, and {messages[0]!r} holds messages. Write both as text, or both as messages: "
            f'"{texts[0]}": [{{"role": "{"user" if texts[0] == "prompt" else "assistant"}", "content": "..."}}]'
        )
    for column in messages:
        keys = keys_of(first.get(column))
        if {"from", "value"} <= keys and "role" not in keys:
            raise UserError(
                f"The messages of {column!r} in {name} have the keys 'from' and 'value', which upstream takes in a column 'conversations' of "
                "SFT alone. Call them 'role' and 'content' in the file, and the roles 'user' and 'assistant'; in Python, "
                "dataset.map(trl.maybe_convert_to_chatml) renames the keys."
            )


def trained_columns(first: Mapping[str, Any], text_field: str) -> tuple[str, ...]:
    """
    Of the columns of a dataset with a `first` row, those that supervised fine-tuning takes first; none if it takes none. It knows
    `conversations` by the keys `from` and `value` in the first row.
    """
    conversations = first.get("conversations")
    is_text = isinstance(conversations, str) and text_field == "conversations"
    # What is missing is told as such.
    is_read = is_text or not conversations or {"from", "value"} <= keys_of(conversations)
    read = {column for column in first if is_read or column != "conversations"}
    kinds = (("input_ids",), _PAIR, ("messages",), ("conversations",), (text_field,))
    return next((kind for kind in kinds if read >= {*kind}), ())


def check_rows_left(dataset, name: str, args: TrainingArguments) -> None:
    """Check that upstream, which drops rows without anything to train on, has left some (`ValueError`)."""
    if isinstance(dataset, datasets.Dataset) and len(dataset) == 0:
        max_length = vars(args).get("max_length")
        raise UserError(
            f"No row of {name} is left when it is prepared{f' with {max_length=}' if max_length else ''}: what is trained on is cut off in "
            "all rows, or has no label. Set a greater max_length, or look at the labels."
        )


def check_dataset(dataset, name: str, args: SFTConfig, has_formatting_func: bool) -> None:
    """Check that a dataset has rows and the columns that supervised fine-tuning needs (`ValueError`)."""
    first = check_has_rows(dataset, name)
    skips_preparation = (args.dataset_kwargs or {}).get("skip_prepare_dataset", False)
    if not first or has_formatting_func or skips_preparation or first.keys() & {*IMAGE_COLUMNS}:
        return
    own_columns = trained_columns(first, args.dataset_text_field)
    if not own_columns:
        raise UserError(
            f"{name} has no column to train on. It has {[*first]}; needed is the text column "
            f"({args.dataset_text_field!r}) or {_NEEDED}. {_fix_of_columns(first, args.dataset_text_field)}"
        )
    check_messages(first, name, [column for column in own_columns if column != "conversations"])
    # Of an evaluation set, upstream takes what is no conversation.
    has_roles = any("role" in keys_of(first.get(column)) for column in TEXT_OR_MESSAGES)
    if args.assistant_only_loss and name == "train_dataset" and not has_roles:
        _refuse_without_roles(first, name, own_columns)
    if isinstance(dataset, datasets.Dataset):
        problems = _rows_without_value(dataset, [*own_columns, *({"labels"} & first.keys())])
        problems |= rows_of_other_kind(dataset, [column for column in own_columns if column in _PAIR])
        for column in sorted({"messages", "conversations", *_PAIR} & {*own_columns}):
            problems |= _rows_of_mistyped_roles(dataset, column)
        if problems:
            raise refusal_of_rows(dataset, name, dict(sorted(problems.items())))


def _refuse_without_roles(first: Mapping[str, Any], name: str, own_columns: Sequence[str]) -> None:
    """Refuse columns to train on that lack the roles that `assistant_only_loss` reads (`ValueError`), by the `first` row of a dataset."""
    column, keys = own_columns[-1], keys_of(first[own_columns[-1]])
    needs = (
        f"assistant_only_loss=True needs messages with the keys 'role' and 'content', and {name} is trained on by its column"
        f"{'s' * (len(own_columns) > 1)} {' and '.join(map(repr, own_columns))}"
    )
    if {"from", "value"} <= keys:
        raise UserError(
            f"{needs}, of messages with 'from' and 'value'. In the file, rename the column to 'messages', the keys to 'role' and 'content', "
            "and the roles to 'user' and 'assistant'; in Python, dataset.map(trl.maybe_convert_to_chatml) renames the column and the keys. "
            "Or leave assistant_only_loss out."
        )
    if isinstance(first[column], str):
        raise UserError(
            f"{needs}, of text. Write conversations into a column 'messages', or leave assistant_only_loss out"
            f"{': without it, only the completion is trained on' if own_columns == _PAIR else ''}."
        )
    if column == "input_ids":
        raise UserError(
            f"{needs}, of tokens. Leave assistant_only_loss out, and mark the answers in 'labels' or 'assistant_masks'."
        )


def _fix_of_columns(first: Mapping[str, Any], text_field: str) -> str:
    """What to do about the columns of a dataset without one to train on, by what its `first` row has in them."""
    names = {column: _names_for(value, text_field) for column, value in first.items()}
    close = {column: difflib.get_close_matches(column, names[column], n=1, cutoff=0.75) for column in names}
    near = {new: old for old, match in close.items() for new in match if new not in first}
    chats = [column for column in first if {"messages", "conversations"} & {*names[column]}]
    if len(chats) == 1 and chats[0] not in (*_PAIR, *_PREFERENCES):
        (old,), new = chats, names[chats[0]][0]
        keys = "'role' and 'content'" if new == "messages" else "'from' and 'value'"
        return f"Did you mean {new!r}? The messages of {old!r} have the keys {keys}. {_rename({old: new})}."
    texts = [column for column, value in first.items() if isinstance(value, str)]
    if len(texts) == 2 and text_field not in near and not {*_PREFERENCES} & {*texts}:
        is_reversed = close[texts[0]] == ["completion"] or close[texts[1]] == ["prompt"]
        question, answer = reversed(texts) if is_reversed else texts
        return (
            f"If {answer!r} answers {question!r}, train on the answers: {_rename({question: 'prompt', answer: 'completion'})}. Or train on "
            f"one of them alone, for example dataset_text_field={texts[0]!r}, or pass a formatting_func that makes one text of a row."
        )
    if near:
        return f"Did you mean {', '.join(map(repr, near))}? {_rename({old: new for new, old in near.items()})}."
    named = f"Name the text column, for example dataset_text_field={texts[0]!r}, or r" if texts else "R"
    return f"{named}ename a column, or pass a formatting_func."


def _names_for(value: Any, text_field: str) -> list[str]:
    """The names that a column with such a value may have."""
    keys = keys_of(value)
    if isinstance(value, str):
        return [text_field, *_PAIR]
    if {"role", "content"} <= keys:
        return ["messages", *_PAIR]
    if {"from", "value"} <= keys:
        return ["conversations"]
    is_tokens = isinstance(value, list) and value and isinstance(value[0], int)
    return ["input_ids"] if is_tokens else []


def _rename(names: Mapping[str, str]) -> str:
    """What to type for columns to have other names."""
    renamed = {old: new for old, new in names.items() if old != new}
    words = " and ".join(f"{old!r} to {new!r}" for old, new in renamed.items())
    return f"Rename the column{'s' * (len(renamed) > 1)} {words} in the file, or, in Python, with dataset.rename_columns({renamed})"


def _rows_of_mistyped_roles(dataset: datasets.Dataset, column: str) -> dict[int, tuple[str, str]]:
    """The rows in which a role is a typing error: templates write it as it is, and it is no answer to train on."""
    problems = {}
    for start, values in read_column(dataset, column):
        message = values.type.value_type if pa.types.is_list(values.type) else None
        if message is None or not pa.types.is_struct(message) or "role" not in message.names:
            return {}
        roles, rows = pc.struct_field(pc.list_flatten(values), "role"), pc.list_parent_indices(values)
        for role in pc.unique(roles).to_pylist():
            close = difflib.get_close_matches(role or "", _ROLES, n=1, cutoff=0.8)
            if close and role != close[0]:
                problem = f"a message has the role {role!r} (did you mean {close[0]!r}?)", ""
                problems |= {start + row: problem for row in rows.filter(pc.equal(roles, role)).to_pylist()}
    return problems


def _rows_without_value(dataset: datasets.Dataset, columns: Iterable[str]) -> dict[int, tuple[str, str]]:
    """The rows that lack a value of a column."""
    problems = {}
    for column in columns:
        # Counted in the whole table, without a look at its values: a selection of its rows may have none.
        if not _nulls(dataset.data.column(column)):
            continue
        values = dataset.with_format("arrow", columns=[column])[:][column]
        for row in range(len(values)) if _nulls(values) else ():
            if _nulls(values.slice(row, 1)):
                is_none = values[row].as_py() is None
                what, keep = ("is None", "{} is not None") if is_none else ("has None in it", "None not in {}")
                problems[row] = f"{column!r} {what}", keep.format(f"row[{column!r}]")
    return problems


def _nulls(values: pa.ChunkedArray) -> int:
    """How many values are missing, and in lists of numbers also of those."""
    is_numbers = pa.types.is_list(values.type) and pa.types.is_integer(values.type.value_type)
    return values.null_count + (pc.list_flatten(values).null_count if is_numbers else 0)


def refuse_images(dataset, name: str, trainer: str) -> None:
    """Refuse images (`ValueError`), which this `trainer` does not take on XLA. Other types than those of `datasets` are left to upstream."""
    images = sorted(set(IMAGE_COLUMNS) & set(known_columns(dataset)))
    if images:
        raise UserError(
            f"{name} has a column {images[0]!r}, and {trainer} does not train on images on XLA; SFTTrainer, DPOTrainer and "
            "KTOTrainer do. Train on CUDA (backend='cuda'), or drop the column: "
            f"dataset.remove_columns({images[0]!r})."
        )
