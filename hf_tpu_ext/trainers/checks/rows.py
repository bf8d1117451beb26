"""A row that upstream cannot make tokens of is named, in place of the error of the tokenizer or the chat template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets

from ...errors import UserError
from ...formatting import count, format_value
from .messages import read_row


#: Columns that hold text or messages, in every trainer.
TEXT_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")
_CONVERSATIONS = ("messages", "conversations")
_ROLES = ("system", "user", "assistant", "tool")
#: How rows are counted.
FIRST_ROW = "the first is row 0"
# How many rows are named of each problem, and how many problems.
_MOST_NAMED = 3
# How many rows with different problems are prepared by themselves.
_MOST_TRIED = 20
# Up to how many rows a dataset is searched for more than one that fails.
_MOST_ROWS = 10_000
_NO_ANSWER = "has no message of the role 'assistant', on which alone assistant_only_loss=True trains"
_MESSAGE = "{'role': 'user', 'content': 'some text'}"
_MESSAGES = f"a list of messages such as {_MESSAGE}"


def refusal_of_rows(dataset: Any, name: str, problems: Mapping[int, tuple[str, str]], end: str = "") -> UserError:
    """
    The error that says what is wrong with rows of a dataset. The first is quoted, with its number before a split.

    Args:
        dataset (`Any`): The dataset.
        name (`str`): What to call the dataset.
        problems (`Mapping[int, tuple[str, str]]`):
            What is wrong, and an expression that is true of a `row` of which it is not, or `""`, by the number of the row.
        end (`str`, *optional*): One more sentence.
    """
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, problem in problems.items():
        rows_of.setdefault(problem, []).append(row)
    ((problem, keep), rows), *others = rows_of.items()
    also = "; ".join(f"{name_rows(rows)}: {problem}" for (problem, _), rows in others[:_MOST_NAMED])
    if rest := sum(len(rows) for _, rows in others[_MOST_NAMED:]):
        also += f"; and {count(rest, 'row')} more"
    row_filter = f"dataset.filter(lambda row: {keep})" if keep else "dataset.filter"
    also = f" Also {also}." if also else ""
    quote = f" {quote_row(dataset, rows[0])}" if isinstance(dataset, datasets.Dataset) else ""
    return UserError(
        f"{name_rows(rows).capitalize()} of {name} ({FIRST_ROW}): {problem}.{also}{quote} Correct this in the file, or, in "
        f"Python, leave such rows out with {row_filter}.{end}"
    )


def quote_row(dataset: datasets.Dataset, row: int) -> str:
    """
    A sentence with the beginning of a row, for it to be found in its file, e.g. `"Row 3 begins {'text': ''}."`, and with its number
    before a split, a shuffle or a selection.
    """
    before = dataset._indices and dataset._indices.column(0)[row].as_py()
    was = "" if before is None else f" was row {before} before the dataset was split, shuffled or selected from, and"
    return f"Row {row}{was} begins {format_value(read_row(dataset, row))}."


def name_rows(rows: Sequence[int]) -> str:
    """Some numbers of rows, and how many more there are, e.g. `"rows 3, 5, 9 and 20 more"`."""
    more = f" and {len(rows) - _MOST_NAMED:,} more" if len(rows) > _MOST_NAMED else ""
    return f"row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:_MOST_NAMED]))}{more}"


@contextmanager
def naming_rows(
    datasets_by_name: Mapping[str, Any],
    columns: Sequence[str],
    prepare: Callable[[datasets.Dataset], Any],
    needs_answer: bool = False,
) -> Iterator[None]:
    """
    Context in which upstream makes tokens of datasets. If it raises, the rows that it raises for are named in a `ValueError`: those that
    hold something other than text or messages, or else those that the template refuses for another reason. An error of all rows is
    upstream's. Where it raises nothing, nothing is looked at: what a row may hold is for the chat template to say.

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
        reason = (str(error).splitlines() or [""])[0]
        for name, dataset in datasets_by_name.items():
            if not isinstance(dataset, datasets.Dataset) or not set(columns) & {*dataset.column_names}:
                continue
            problems = _find_bad_rows(dataset, columns, prepare, needs_answer)
            if not problems:
                refused = ("refused by the tokenizer or the chat template", "")
                problems = dict.fromkeys(_rows_that_fail(dataset, prepare), refused)
            if problems:
                # Of a row without an answer, upstream says that the template has no marks.
                is_known = all(problem.endswith(_NO_ANSWER) for problem, _ in problems.values())
                end = "" if is_known else f" Upstream says {type(error).__name__}: {reason}"
                raise refusal_of_rows(dataset, name, problems, end) from error
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


def rows_of_other_kind(dataset: datasets.Dataset, columns: Sequence[str]) -> dict[int, tuple[str, str]]:
    """
    The rows with text in a column that has messages in the first row, or the other way round: upstream ends text with a token of its
    own if the first row has text. Such a column is read as JSON.
    """
    found = {}
    for column in columns:
        if not isinstance(dataset.features[column], datasets.Json):
            continue
        are_text = [isinstance(row[column], str) for row in _read(dataset, [column])]
        words = ("holds messages", "is text") if are_text[0] else ("is text", "holds messages")
        problem = f"{column!r} {words[0]}, and {words[1]} in row 0; give one of both in all rows"
        keep = f"{'' if are_text[0] else 'not '}isinstance(row[{column!r}], str)"
        found |= {row: (problem, keep) for row, is_text in enumerate(are_text) if is_text != are_text[0]}
    return found


def _read(dataset: datasets.Dataset, columns: Sequence[str]) -> datasets.Dataset:
    return dataset.with_format(None).select_columns([column for column in columns if column in dataset.column_names])


def _find_bad_rows(
    dataset: datasets.Dataset, columns: Sequence[str], prepare: Callable[[datasets.Dataset], Any], needs_answer: bool
) -> dict[int, tuple[str, str]]:
    """What the rows hold that hold something else than text or messages and cannot be prepared."""
    # Kinds of values that the template takes, and sets of kinds that it refuses, as an earlier row has shown.
    accepted, refused, found = set(), [], {}
    for index, row in enumerate(_read(dataset, columns)):
        unusual = {kind: problem for column in row for kind, problem in _unusual_in(column, row[column])}
        for column in {*_CONVERSATIONS} & {*row} if needs_answer and not unusual else ():
            if "assistant" not in map(_role_of, row[column]):
                unusual[column, "no answer"] = f"{column!r} {_NO_ANSWER}"
        unusual = {kind: problem for kind, problem in unusual.items() if kind not in accepted}
        if not unusual:
            continue
        # After so many refusals, what is new is taken for one more: each try takes a part of a second.
        if len(refused) < _MOST_TRIED and not any(kinds <= unusual.keys() for kinds in refused):
            # Alone, a row with a text in place of messages is left out, and does not fail.
            has_text = any((column, str) in unusual for column in _CONVERSATIONS)
            if not has_text and not _fails(dataset, [index], prepare):
                accepted |= unusual.keys()
                continue
            refused.append(unusual.keys())
        found[index] = (next(iter(unusual.values())), "")
    return found


def _rows_that_fail(dataset: datasets.Dataset, prepare: Callable[[datasets.Dataset], Any]) -> list[int]:
    """
    The first rows that cannot be prepared, of a large dataset one, each found by halves. None where it is not for a row that this fails:
    the first and the last fail too.
    """
    found: list[int] = []
    most = _MOST_NAMED + 1 if len(dataset) <= _MOST_ROWS else 1

    def look_at(rows: range) -> None:
        if len(found) == most or not _fails(dataset, rows, prepare):
            return
        if len(rows) == 1:
            found.extend(rows)
        else:
            look_at(rows[: len(rows) // 2])
            look_at(rows[len(rows) // 2 :])

    look_at(range(len(dataset)))
    fails_for_all = found[:1] == [0] and _fails(dataset, [len(dataset) - 1], prepare)
    return [] if fails_for_all else found


def _fails(dataset: datasets.Dataset, rows: Sequence[int], prepare: Callable[[datasets.Dataset], Any]) -> bool:
    try:
        prepare(dataset.select(rows))
    except Exception:
        return True
    return False


def _unusual_in(column: str, value: Any) -> Iterator[tuple[tuple, str]]:
    """Whatever is not a string in a value, each by its kind, with what was found and what is allowed."""
    if isinstance(value, str) and column not in _CONVERSATIONS:
        return
    if not isinstance(value, list) or column not in TEXT_OR_MESSAGES:
        expectation = "a string"
        if column in _CONVERSATIONS:
            expectation = _MESSAGES
        elif column in TEXT_OR_MESSAGES:
            expectation += (
                f" or {_MESSAGES}, one of both in all rows (where a file has both, datasets reads the strings as JSON)"
            )
        yield (column, type(value)), f"{column!r} is {format_value(value)}, expected {expectation}"
        return
    if not value:
        yield (column, "empty"), f"{column!r} is an empty list, expected {_MESSAGES}"
    for place, message in enumerate(value):
        where = f"{column}[{place}]"
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
            texts = {key for key, value in message.items() if isinstance(value, str)} - {"role", "from"}
            but = f" but {', '.join(map(repr, sorted(texts)))}" if content is None and texts else ""
            yield kind, f"{where} has {has}{but}, expected a string"


def _role_of(message: Mapping[str, Any]) -> Any:
    return message.get("role") or message.get("from")
