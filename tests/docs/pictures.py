"""
Draws the pictures of the documentation.

    python tests/docs/pictures.py                            # those that are drawn by hand
    python tests/docs/pictures.py --runs runs/low runs/high  # also that of a comparison of runs
"""

import argparse
import re
from html import escape
from pathlib import Path

from hf_tpu_ext.report.make import make_report


ASSETS = Path(__file__).parents[2] / "docs" / "assets"
# Seen well on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3b82f6", "#f97316", "#10b981", "#a855f7", "#94a3b8"
_LINE = 16


class Picture:
    """An SVG file of boxes, arrows and words, whose ink is that of the page's text."""

    def __init__(self, title: str, width: int, height: int):
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" style="color-scheme: light dark; color: CanvasText" font-family="sans-serif" font-size="13">\n'
            f"<title>{escape(title)}</title>\n"
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>\n'
        )
        self._parts: list[str] = []

    def words(self, x: float, y: float, text: str, anchor: str = "middle", bold: bool = False) -> None:
        """Lines of text around a height."""
        lines = text.split("\n")
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(lines):
            height = y + 4.5 + _LINE * (number - (len(lines) - 1) / 2)
            self._parts.append(
                f'<text x="{x:g}" y="{height:g}" text-anchor="{anchor}" fill="currentColor"{weight}>{escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, text: str, colour: str = GREY) -> None:
        """A box with text in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{colour}" '
            f'fill-opacity="0.2" stroke="{colour}"/>'
        )
        self.words(x + width / 2, y + height / 2, text)

    def arrow(self, *points: tuple[float, float], label: str = "") -> None:
        """An arrow through points, with a label above its first part."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="currentColor" marker-end="url(#tip)"/>')
        if label:
            (x, y), (to, _) = points[:2]
            self.words((x + to) / 2, y - 11, label)

    def svg(self) -> str:
        """The file."""
        return self._head + "\n".join(self._parts) + "\n</svg>\n"


def draw_step() -> Picture:
    """The way of a batch through a step."""
    picture = Picture("A batch's way through a training step", 780, 372)
    picture.words(160, 16, "host, Python", bold=True)
    picture.words(630, 16, "device", bold=True)
    picture.box(20, 34, 280, 44, "dataset: tokenized and packed by TRL")
    picture.arrow((160, 78), (160, 96))
    picture.box(20, 98, 280, 44, "data collator: pads to a declared length", BLUE)
    picture.arrow((160, 142), (160, 160))
    picture.box(20, 162, 280, 52, "batch, learning rate, seed\nin one transfer")
    picture.box(490, 162, 280, 52, "weights, moments, sums of metrics:\nwritten in place")
    picture.arrow((300, 188), (488, 188), label="4 x 1024 tokens")
    picture.arrow((160, 214), (160, 232))
    picture.box(20, 234, 132, 68, "steps 1 and 2\nof a shape:\nare traced", ORANGE)
    picture.box(168, 234, 132, 68, "later steps:\nonly the handle\nof the program", GREEN)
    picture.arrow((86, 302), (86, 312), (395, 312), (395, 250), (488, 250))
    picture.words(435, 239, "graph")
    picture.arrow((300, 282), (488, 282))
    picture.words(435, 271, "launch")
    picture.box(490, 234, 280, 30, "compiled once", ORANGE)
    picture.box(490, 268, 280, 44, "one program: forward, backward,\nclip, update, metrics", GREEN)
    picture.arrow((630, 234), (630, 216))
    picture.box(20, 330, 280, 36, "log: loss and metrics")
    picture.arrow((630, 312), (630, 348), (302, 348))
    picture.words(465, 337, "one transfer, at a log only")
    return picture


def draw_mesh() -> Picture:
    """Rows of a batch and shards of a weight on eight chips."""
    picture = Picture("mesh: data=2,fsdp=4 with a batch of 16 rows and a weight W", 780, 232)
    shards = (BLUE, ORANGE, GREEN, PURPLE)
    for column, colour in enumerate(shards):
        left = 110 + 168 * column
        picture.words(left + 75, 14, f"fsdp {column}", bold=True)
        for row in range(2):
            chip = 4 * row + column
            top = 30 + 102 * row
            picture.box(left, top, 150, 90, "")
            picture.words(left + 75, top + 14, f"chip {chip}")
            picture.box(left + 8, top + 27, 134, 26, f"rows {2 * chip} and {2 * chip + 1}")
            picture.box(left + 8, top + 58, 134, 26, f"W, shard {column}", colour)
    for row in range(2):
        picture.words(52, 75 + 102 * row, f"data {row}", bold=True)
    return picture


def draw_teacher_cache() -> Picture:
    """A teacher's cache: written once, read by many runs, and what it holds of a token."""
    picture = Picture("A teacher's cache", 780, 250)
    picture.box(10, 34, 180, 56, "teacher\nreads the data once", ORANGE)
    picture.arrow((190, 62), (288, 62), label="top K")
    picture.box(290, 34, 200, 56, "cache on disk\n6 K + 2 bytes a token", BLUE)
    for number, name in enumerate(("run 1", "run 2", "run 3")):
        top = 12 + 36 * number
        picture.arrow((490, 62), (588, top + 14))
        picture.box(590, top, 180, 28, f"{name}: student alone", GREEN)
    picture.words(10, 138, "for example, K = 3: the token after “The capital of France is”", "start", bold=True)
    for number, (token, probability) in enumerate((("Paris", 0.61), ("the", 0.08), ("a", 0.05), ("all others", 0.26))):
        top = 154 + 23 * number
        picture.words(100, top + 9, token, "end")
        picture.box(112, top, 520 * probability, 18, "", BLUE if number < 3 else GREY)
        kept = "id and log-prob" if number < 3 else "log of their sum"
        picture.words(124 + 520 * probability, top + 9, f"{probability:.2f}   {kept}", "start")
    return picture


def draw_comparison(runs: list[str], directory: Path) -> str:
    """Two pictures of the page that `hf-tpu report` makes of runs, one above the other."""
    from base64 import b64decode

    page = make_report(runs, directory).read_text(encoding="utf-8")
    shown = dict(re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)" alt="([^"]*)"', page))
    files = {title: b64decode(data).decode() for data, title in shown.items()}
    top, parts = 0.0, []
    for title in ("Loss", "Where the time went"):
        svg = files[title][files[title].index("<svg") :]
        # Names within a file are its own.
        svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{title[0]}", svg)
        width, height = map(float, re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg).groups())
        parts.append(svg.replace("<svg ", f'<svg y="{top:g}pt" ', 1))
        top += height + 8
    # In points, as the figures are.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * 4 / 3:g} {top * 4 / 3:g}" '
        'style="color-scheme: light dark; color: CanvasText">\n' + "\n".join(parts) + "\n</svg>\n"
    )


#: The pictures that need no run.
PICTURES = {"step.svg": draw_step, "mesh.svg": draw_mesh, "teacher_cache.svg": draw_teacher_cache}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=[], help="output directories of runs")
    arguments = parser.parse_args()
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw().svg(), encoding="utf-8")
    if arguments.runs:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as made:
            (ASSETS / "report.svg").write_text(draw_comparison(arguments.runs, Path(made)), encoding="utf-8")
