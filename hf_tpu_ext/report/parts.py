"""What a report is made of, whatever it is written as."""

import base64
from dataclasses import dataclass, field


@dataclass
class Figure:
    """A figure: what it shows, and its picture as an SVG file."""

    title: str
    svg: str

    @property
    def uri(self) -> str:
        """The picture as the source of an image that is loaded from nowhere."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


@dataclass
class Table:
    """A table. One that has a title is folded away under it until somebody asks for it."""

    columns: list[str]
    rows: list[list[str]]
    title: str | None = None


@dataclass
class Section:
    """A part of a report: lines of text, figures, and tables."""

    title: str
    lines: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass
class Report:
    """A report. Its headline is the numbers to see first, by what they are. Sections that say nothing are left out."""

    title: str
    subtitle: str
    headline: dict[str, str]
    sections: list[Section]

    def __post_init__(self) -> None:
        self.sections = [section for section in self.sections if section.lines or section.figures or section.tables]
