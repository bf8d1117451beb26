"""A report as Markdown, without figures."""

import re

from .parts import Report, Section, Table


def render_markdown(report: Report) -> str:
    """
    Write a report as Markdown.

    Args:
        report ([`Report`]):
            The report.

    Returns:
        `str`: Markdown.
    """
    parts = [f"# {_plain(report.title)}", _plain(report.subtitle)]
    if report.headline:
        parts.append(_table(Table(["", ""], [list(row) for row in report.headline.items()])))
    return "\n\n".join([*parts, *map(_section, report.sections)]) + "\n"


def _section(section: Section) -> str:
    parts = [f"## {_plain(section.title)}", *(f"- {_plain(line)}" for line in section.lines)]
    text = "\n".join(parts).replace("\n", "\n\n", 1)
    tables = [f"### {table.title}\n\n{_table(table)}" if table.title else _table(table) for table in section.tables]
    return "\n\n".join([text, *tables])


def _table(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else _plain(cell) for cell in row)} |" for row in rows)


def _plain(text: str) -> str:
    """Text that Markdown does not take for its own signs, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))
