"""One line of an examination."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """
    Something that was looked at.

    Args:
        name (`str`):
            What.
        status (`str`):
            `"ok"`, `"failed"`, or `"none"` where there is nothing to look at.
        text (`str`):
            What was found.
        fix (`str`, *optional*):
            What to do; a failed check has one.
    """

    name: str
    status: Literal["ok", "failed", "none"]
    text: str
    fix: str | None = None

    def __post_init__(self):
        assert (self.status == "failed") == (self.fix is not None), self
