"""What a report is made of, whatever it is written as."""

from dataclasses import dataclass, field


@dataclass
class Table:
    """A table. One that has a title is folded away under it until somebody asks for it."""

    columns: list[str]
    rows: list[list[str]]
    title: str | None = None


@dataclass
class Section:
    """A part of a report: lines of text, figures as SVG elements, and tables."""

    title: str
    lines: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Report:
    """A report. Its headline is the numbers to see first, by what they are."""

    title: str
    subtitle: str
    headline: dict[str, str]
    sections: list[Section]
