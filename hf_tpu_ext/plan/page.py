"""A plan as a page of text."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from ..formatting import count, format_bytes, format_seconds, format_size
from ..report.planned import format_span
from .result import Plan, Trial


WIDTH = 100
_BAR = 40
_LABEL = 28


def render(plan: Plan) -> str:
    """Write a plan as a page of text of at most 100 columns, without a newline at its end."""
    return _tidy(_TEMPLATE.render(plan=plan))


def render_found(plan: Plan) -> str:
    """Write the part of the page that a search adds to: variants, and what to change."""
    return _tidy("".join(_TEMPLATE.blocks["found"](_TEMPLATE.new_context({"plan": plan}))))


def format_count(number: float) -> str:
    """A large number for people, e.g. `"22.6 T"`, `"596 M"`."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number:.3g} "


def _tidy(page: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", page).strip()


def _wrap(text: str, first: str = "", rest: str = "") -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _label(text: str, name: str = "") -> str:
    return _wrap(text, f"{name:<{_LABEL}}", " " * _LABEL)


def _bars(parts: dict[str, int], limit: int) -> Iterator[tuple[str, int, str]]:
    """Names, sizes and bars of parts, each bar from where the one before ends; longer ones only where they do not fit."""
    scale, before = _BAR / max(limit, sum(parts.values())), 0
    for name, size in parts.items():
        start, end = round(before * scale), round((before + size) * scale)
        yield name, size, "." * start + "#" * (end - start) + "." * (round(limit * scale) - end)
        before += size


def _table(trials: Sequence[Trial]) -> list[str]:
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    rows = [[*names, "peak HBM", "fits", "expected step", "tokens/s/chip"]]
    for trial in trials:
        cells = (
            (trial.peak_bytes, format_bytes),
            (trial.fits, {True: "yes", False: "no"}.get),
            (trial.seconds, format_seconds),
            (trial.tokens_per_second, "{:,.0f}".format),
        )
        rows.append(
            [trial.settings.get(name, "") for name in names]
            + ["?" if value is None else words(value) for value, words in cells]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


_ENVIRONMENT = Environment(undefined=StrictUndefined, trim_blocks=True)
_ENVIRONMENT.filters |= {
    "bars": _bars,
    "bytes": format_bytes,
    "dollars": "${:,.2f}".format,
    "labelled": _label,
    "number": format_count,
    "seconds": format_seconds,
    "shape": format_size,
    "span": partial(format_span, words=str),
    "table": _table,
    "things": count,
    "wrapped": _wrap,
}
_TEMPLATE = _ENVIRONMENT.from_string(Path(__file__).with_name("page.txt").read_text(encoding="utf-8"))
