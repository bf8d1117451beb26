"""What a report is made of, whatever it is written as."""

from dataclasses import dataclass, field


@dataclass
class Table:
    """
    A table.

    Args:
        columns (`list[str]`):
            Their names.
        rows (`list[list[str]]`):
            The cells.
        title (`str`, *optional*):
            What it holds, where it is folded away until somebody asks for it.
    """

    columns: list[str]
    rows: list[list[str]]
    title: str | None = None


@dataclass
class Section:
    """
    A part of a report.

    Args:
        title (`str`):
            Its heading.
        lines (`list[str]`):
            Text.
        figures (`list[str]`):
            SVG elements.
        tables (`list[Table]`):
            Tables.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Report:
    """
    A report.

    Args:
        title (`str`):
            Its heading.
        subtitle (`str`):
            What it is about.
        headline (`dict[str, str]`):
            The numbers to see first, by what they are.
        sections (`list[Section]`):
            Its parts.
    """

    title: str
    subtitle: str
    headline: dict[str, str]
    sections: list[Section]
