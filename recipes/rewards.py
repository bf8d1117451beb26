"""Rewards that recipes name."""

import re


def last_number(message: str | list[dict[str, str]]) -> float | None:
    """The last number of a text, or of a conversation's last message; `None` if it has none."""
    text = message if isinstance(message, str) else message[-1]["content"]
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def same_number(completions, solution, **kwargs) -> list[float]:
    """
    1 for a completion (a text or a conversation) whose last number is that of the text in the column `solution`, and 0 for another.
    """
    return [
        float(last_number(made) is not None and last_number(made) == last_number(wanted))
        for made, wanted in zip(completions, solution, strict=True)
    ]
