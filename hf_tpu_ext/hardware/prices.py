"""What chips cost, from a file that anyone can edit."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError


#: The prices that are used if no other file is given. Nothing is ever fetched.
PRICES = Path(__file__).with_name("prices.json")
_EXAMPLE = (
    '{"v5e": {"dollars_per_chip_hour": 1.2, "region": "us-central1", "date": "2026-11-20", "source": "my contract"}}'
)


@dataclass(frozen=True)
class Price:
    """US dollars for a chip and an hour: where, when (a year, month or day, e.g. `"2026-11-20"`), and who says so."""

    dollars_per_chip_hour: float
    region: str
    date: str
    source: str


def read_prices(path: str | Path = PRICES) -> dict[str, Price]:
    """
    Read a file of prices: a JSON object with the fields of [`Price`] by kind of chip, e.g. `"v5e"`. Raises
    `ValueError` where it cannot be read, or a price in it is not one.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"prices {path} cannot be read: {error}. Write it like this: {_EXAMPLE}") from error
    if not isinstance(content, dict):
        raise UserError(f"prices {path}: it is not an object. Write it like this: {_EXAMPLE}")
    for chip, values in content.items():
        if problem := _what_is_wrong(values):
            raise UserError(f"prices {path}, {chip}: {problem}. Write it like this: {_EXAMPLE}")
    return {chip: Price(**values) for chip, values in content.items()}


def _what_is_wrong(values: object) -> str | None:
    if not isinstance(values, dict):
        return f"expected an object, found {values!r}"
    names = Price.__dataclass_fields__.keys()
    if missing := names - values.keys():
        return f"{', '.join(sorted(missing))} missing"
    if further := values.keys() - names:
        return f"{', '.join(sorted(further))} unknown"
    dollars = values["dollars_per_chip_hour"]
    if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 <= dollars < math.inf:
        return f"dollars_per_chip_hour is {dollars!r}, expected a number of dollars"
    for name in names - {"dollars_per_chip_hour"}:
        if not isinstance(values[name], str):
            return f"{name} is {values[name]!r}, expected text"
    if not re.fullmatch(r"\d{4}(-\d\d){0,2}", values["date"]):
        return f'date is {values["date"]!r}, expected "2026", "2026-11" or "2026-11-20"'
    return None
