"""One line of an examination."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What was looked at, and what was found: `"none"` where there is nothing to look at. A failed check has a fix."""

    name: str
    status: Literal["ok", "failed", "none"]
    text: str
    fix: str | None = None

    def __post_init__(self):
        assert (self.status == "failed") == (self.fix is not None), self
