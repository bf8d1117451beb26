"""One line of an examination, and what a trial of a mechanism makes one of."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Check:
    """
    What was looked at, and what was found: `"none"` where there is nothing to look at. A failed check has a fix.
    `numbers` go into the JSON file and are not shown.
    """

    name: str
    status: Literal["ok", "failed", "none"]
    text: str
    fix: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        assert (self.status == "failed") == (self.fix is not None), self


class WrongError(Exception):
    """A mechanism does not do what it should. The message says what it does."""


class Finding(NamedTuple):
    """What a trial says of a mechanism, and the numbers behind it; `applies` is false where there is nothing to try."""

    text: str
    numbers: dict[str, Any] = {}
    applies: bool = True
