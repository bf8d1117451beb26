"""Figures of a report, in the colours of a light page or a dark one."""

import io
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

from ..formatting import format_number, format_seconds
from ..installing import install_command
from .metrics import CLASSES_PER_DECADE
from .parts import Figure


#: Points of a curve, as pairs of a step, or a time, and a value.
Points = Sequence[tuple[float, float]]
#: What to install for figures.
HOW_TO_DRAW = f"There are no figures: they are drawn by matplotlib. {install_command('report')}, then give the command"

_STYLE = Path(__file__).with_name("figures.mplstyle")
# The style has this colour where text and axes are to have that of the page's text.
_INK = "#010203"
_LIGHT_OR_DARK = "color-scheme: light dark; color: CanvasText"
# Seen well on white and on black, and beside each other.
_COLOURS = "#3b82f6 #f97316 #16a34a #a855f7 #eab308 #06b6d4 #dc2626 #94a3b8 #84cc16 #f472b6 #9a6b3f #4f46e5".split()
_FEW_POINTS = 50
# How many letters of a legend fit beside each other in a figure.
_WIDTH = 96
# Values of curves are drawn by their logarithms where most of them would lie on the axis, and steps where the shortest curve
# would be a dot.
_FAR_APART = 50


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _draw(title: str, plot: Callable, height: float = 2.6, labels: Iterable[str] = ()) -> Figure:
    """One figure. `plot` is called with its axes; what it labels is named below them, where it hides nothing."""
    import matplotlib
    from matplotlib import figure

    labels = list(labels)
    columns = max(1, _WIDTH // (8 + max(map(len, labels), default=0)))
    height += 0.18 * math.ceil(len(labels) / columns)
    # pyplot would keep figures, and choose a backend for the whole process.
    with matplotlib.rc_context(fname=_STYLE):
        canvas = figure.Figure(figsize=(6.4, height), layout="constrained")
        axes = canvas.add_subplot()
        plot(axes)
        if labels:
            canvas.legend(loc="outside lower center", ncols=columns)
        axes.set_title(title)
        file = io.StringIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue().replace("<svg ", f'<svg style="{_LIGHT_OR_DARK}" ', 1)
    return Figure(title, svg.replace(_INK, "currentColor"))


def draw_curves(
    title: str,
    curves: Mapping[str, Points],
    held_out: Mapping[str, Points] | None = None,
    over: str = "optimizer step",
) -> Figure:
    """
    Draw values over optimizer steps, or what `over` names. What evaluations have of the same is dashed, in the same colours.
    Where points are few, each is marked.
    """
    parts = {"": curves, ", evaluation": held_out or {}}
    labels = dict.fromkeys(label for part in parts.values() for label in part)
    colours = dict(zip(labels, cycle(_COLOURS), strict=False))

    def plot(axes) -> None:
        for (suffix, part), line in zip(parts.items(), ("-", "--"), strict=True):
            for label, points in part.items():
                marker = "o" if len(points) <= _FEW_POINTS else None
                x, y = zip(*points, strict=True)
                axes.plot(x, y, line, color=colours[label], marker=marker, label=f"{label}{suffix}")
        curves = [points for part in parts.values() for points in part.values()]
        ends = [points[-1][0] for points in curves if points[-1][0] > 0]
        if ends and max(ends) > _FAR_APART * min(ends):
            # An evaluation before the first step has a place, too.
            _by_logarithm(axes, "x", linthresh=1)
        else:
            axes.xaxis.set_major_formatter(lambda value, _: format_number(value))
        values = [value for points in curves for _, value in points]
        if min(values) > 0 and max(values) > _FAR_APART * statistics.median(values):
            _by_logarithm(axes, "y")
        axes.set_xlabel(over)

    lines = [f"{label}{suffix}" for suffix, part in parts.items() for label in part]
    return _draw(title, plot, labels=lines if len(lines) > 1 else ())


def _by_logarithm(axes, name: str, unit: Callable[[float], str] = format_number, **about_zero: float) -> None:
    """Scale an axis by logarithms, with labels of text: by default they are formulas, which it is not taken for here."""
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    {"x": axes.set_xscale, "y": axes.set_yscale}[name]("symlog" if about_zero else "log", **about_zero)
    first, last = axis.get_view_interval()
    # Where there is room, 2 and 5 have labels between powers of ten.
    between = "25" if last < 1000 * first else ""
    axis.set_major_formatter(lambda value, _: unit(value))
    axis.set_minor_formatter(lambda value, _: unit(value) if f"{value:e}"[0] in between else "")


def draw_shares(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw, for each run, a bar of what its phases have of the time."""
    parts = dict.fromkeys(part for of_run in shares.values() for part in of_run)

    def plot(axes) -> None:
        start = dict.fromkeys(shares, 0.0)
        for part, colour in zip(parts, cycle(_COLOURS), strict=False):
            widths = [100 * of_run.get(part, 0.0) / sum(of_run.values()) for of_run in shares.values()]
            axes.barh(list(shares), widths, left=list(start.values()), color=colour, label=part, height=0.6)
            start = {run: begin + width for (run, begin), width in zip(start.items(), widths, strict=True)}
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("% of the time")

    return _draw("Where the time went", plot, 1.0 + 0.25 * len(shares), parts)


def draw_mean_step(seconds: Mapping[str, float]) -> Figure:
    """Draw a bar for what each phase takes of a step, with its time."""

    def plot(axes) -> None:
        bars = axes.barh(list(seconds), list(seconds.values()), color=_COLOURS[0], height=0.6)
        axes.bar_label(bars, list(map(format_seconds, seconds.values())), padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value))

    return _draw("Mean time of a step by phase", plot, 0.6 + 0.2 * len(seconds))


def draw_step_times(classes: Counter[int]) -> Figure:
    """Draw how many steps took how long, by class of time."""

    def plot(axes) -> None:
        first, last = min(classes), max(classes)
        edges = [10 ** (number / CLASSES_PER_DECADE) for number in range(first, last + 2)]
        axes.stairs([classes[number] for number in range(first, last + 1)], edges, color=_COLOURS[0], fill=True)
        _by_logarithm(axes, "x", format_seconds)
        if max(classes.values()) > _FAR_APART * min(classes.values()):
            _by_logarithm(axes, "y")
            axes.set_ylim(bottom=0.5)
        axes.set_ylabel("steps")

    return _draw("Time of whole steps", plot)
