"""One line of an examination."""

from dataclasses import dataclass, field
from typing import Any, Literal


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
