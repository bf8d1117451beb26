"""A row that upstream cannot make tokens of is named, in place of the error of the tokenizer or the chat template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets

from ...errors import UserError
from ...formatting import format_value


#: Columns that hold text or messages, in every trainer.
TEXT_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
_CONVERSATIONS = ("messages", "conversations")
_ROLES = ("system", "user", "assistant", "tool")
_MESSAGE = "{'role': 'user', 'content': 'some text'}"
_MESSAGES = f"a list of messages such as {_MESSAGE}"


@contextmanager
def naming_rows(
    datasets_by_name: Mapping[str, Any],
    columns: Sequence[str],
    prepare: Callable[[datasets.Dataset], Any],
    needs_answer: bool = False,
) -> Iterator[None]:
    """
    Context in which upstream makes tokens of datasets. If it raises, the first row that it raises for, and that holds
    something other than text or messages, is named in a `ValueError`. Every other error is upstream's. Where it raises
    nothing, nothing is looked at: what a row may hold is for the chat template to say.

    Args:
        datasets_by_name (`Mapping[str, Any]`):
            The datasets, by what to call them in a message. Those of other types than [`~datasets.Dataset`] are left out.
        columns (`Sequence[str]`): What tokens are made of; columns that a dataset does not have are left out.
        prepare (`Callable`): Makes tokens of some rows as upstream does.
        needs_answer (`bool`, *optional*, defaults to `False`):
            Whether a conversation without a message of the assistant is something other, too.
    """
    try:
        yield
    # Tokenizers and templates raise what they like.
    except Exception as error:
        for name, dataset in datasets_by_name.items():
            is_known = isinstance(dataset, datasets.Dataset)
            if is_known and (bad_row := _find_bad_row(dataset, columns, prepare, needs_answer)) is not None:
                reason = (str(error).splitlines() or [""])[0]
                raise UserError(
                    f"Row {bad_row[0]} of {name}: {bad_row[1]}. Correct the row, or leave such rows out with dataset.filter. "
                    f"Upstream says {type(error).__name__}: {reason}"
                ) from error
        raise


def first_that_fails(rows: int, attempt: Callable[[int], Any]) -> int | None:
    """The first of so many rows for whose number `attempt` raises, `None` if it raises for none."""
    for row in range(rows):
        try:
            attempt(row)
        # Decoders and functions of the user's raise what they like.
        except Exception:
            return row
    return None


def _find_bad_row(
    dataset: datasets.Dataset, columns: Sequence[str], prepare: Callable[[datasets.Dataset], Any], needs_answer: bool
) -> tuple[int, str] | None:
    """The first row that holds something else than text or messages and cannot be prepared, and what it holds."""
    present = [column for column in columns if column in dataset.column_names]
    if not present:
        return None
    # Kinds of values that the template takes, as an earlier row has shown.
    accepted_kinds = set()
    for index, row in enumerate(dataset.with_format(None).select_columns(present)):
        unusual = {kind: problem for column in present for kind, problem in _unusual_in(column, row[column])}
        for column in {*_CONVERSATIONS} & {*present} if needs_answer and not unusual else ():
            if "assistant" not in map(_role_of, row[column]):
                problem = f"{column!r} has no message of the role 'assistant', on which alone assistant_only_loss=True trains"
                unusual[column, "no answer"] = problem
        if unusual.keys() <= accepted_kinds:
            continue
        try:
            prepare(dataset.select([index]))
        except Exception:
            return index, next(problem for kind, problem in unusual.items() if kind not in accepted_kinds)
        accepted_kinds |= unusual.keys()
    return None


def _unusual_in(column: str, value: Any) -> Iterator[tuple[tuple, str]]:
    """Whatever is not a string in a value, each by its kind, with what was found and what is allowed."""
    if isinstance(value, str):
        return
    if not isinstance(value, list) or column not in TEXT_OR_MESSAGES:
        expectation = "a string"
        if column in TEXT_OR_MESSAGES:
            expectation += (
                f" or {_MESSAGES}, one of both in all rows (where a file has both, datasets reads the strings as JSON)"
            )
        yield (column, type(value)), f"{column!r} is {format_value(value)}, expected {expectation}"
        return
    if not value:
        yield (column, "empty"), f"{column!r} is an empty list, expected {_MESSAGES}"
    for place, message in enumerate(value):
        where = f"message {place} of {column!r}"
        if not isinstance(message, dict):
            yield (column, "message", type(message)), f"{where} is {format_value(message)}, expected {_MESSAGE}"
            continue
        # `from` and `value` are those of `conversations`, which upstream renames.
        role = _role_of(message)
        content = message.get("value") if message.get("content") is None else message["content"]
        if role not in _ROLES:
            has = "no role" if role is None else f"the role {role!r}"
            yield (column, "role", role), f"{where} has {has}, expected one of {', '.join(map(repr, _ROLES))}"
        if not isinstance(content, str):
            kind = (column, "content", type(content), role, bool(message.get("tool_calls")))
            has = "no content (None)" if content is None else f"the content {format_value(content)}"
            yield kind, f"{where} has {has}, expected a string"


def _role_of(message: Mapping[str, Any]) -> Any:
    return message.get("role") or message.get("from")
