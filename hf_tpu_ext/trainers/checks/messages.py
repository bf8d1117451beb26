"""Rows as they are read for checks: one by one, and messages as arrays, also those that `datasets` keeps as JSON."""

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa


#: Rows that are read together.
ROWS_AT_ONCE = 10_000
# What is asked of a content, which may be long or a list of parts, is whether there is any.
_CONTENT = "some content"
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.bool_()}))


def read_row(dataset: datasets.Dataset, row: int) -> dict[str, Any]:
    """A row of a dataset, without pictures and sounds, which would have to be decoded."""
    plain = (datasets.Value, datasets.List, datasets.Json)
    columns = [name for name, feature in dataset.features.items() if isinstance(feature, plain)]
    return dataset.with_format(None).select_columns(columns)[row] if columns else {}


def first_row(dataset: datasets.Dataset | datasets.IterableDataset) -> dict[str, Any] | None:
    """The first row of a dataset, by all columns, with `None` for what [`read_row`] leaves out; `None` where there are no rows."""
    if isinstance(dataset, datasets.IterableDataset):
        return next(iter(dataset.with_format(None)), None)
    return dict.fromkeys(dataset.column_names) | read_row(dataset, 0) if len(dataset) else None


def keys_of(value: Any) -> set[str]:
    """The keys of the first message of a value, by which upstream knows a conversation; none if it holds no messages."""
    return {*value[0]} if isinstance(value, list) and value and isinstance(value[0], dict) else set()


def read_column(dataset: datasets.Dataset, column: str) -> Iterator[tuple[int, pa.Array]]:
    """
    The values of a column, some rows at a time, each time behind the number of their first row. Values that `datasets` keeps as JSON, as
    it does where types differ from row to row, are read as lists of messages with `role`, whether there is a `content`, and `tool_calls`.
    """
    # A field that only has such a name is read as well.
    is_json = "arrow.json" in str(dataset.data.column(column).type)
    rows = dataset.select_columns([column]).with_format(None if is_json else "arrow")
    start = 0
    for batch in rows.iter(ROWS_AT_ONCE):
        values = pa.array(map(_messages, batch[column]), _MESSAGES) if is_json else batch[column].combine_chunks()
        yield start, values
        start += len(values)


def _messages(value: Any) -> list[dict[str, Any]]:
    messages = []
    for message in value if isinstance(value, list) else ():
        fields = message if isinstance(message, dict) else {}
        role, content = (fields.get(key, fields.get(other)) for key, other in (("role", "from"), ("content", "value")))
        messages.append(
            {
                "role": role if isinstance(role, str) else None,
                "content": _CONTENT if (content.strip() if isinstance(content, str) else content) else None,
                # As of a column of calls, those that are none are missing.
                "tool_calls": bool(fields.get("tool_calls")) or None,
            }
        )
    return messages
