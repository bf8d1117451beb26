"""Figures of a report, as SVG that takes the colours of the page around it."""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from ..words import format_size
from .phases import CLASSES_PER_DECADE, PHASES


#: Points of a curve, as pairs of a step, or a time, and a value.
Points = Sequence[tuple[float, float]]
#: What to install for figures.
HOW_TO_DRAW = (
    "There are no figures: they are drawn by matplotlib. pip install 'hf_tpu_ext[report]', then give the command"
)

# Seen well on white and on black.
_COLOURS = (
    "#3b82f6",
    "#f97316",
    "#10b981",
    "#a855f7",
    "#ef4444",
    "#14b8a6",
    "#ec4899",
    "#eab308",
    "#84cc16",
    "#6366f1",
    "#94a3b8",
)
_GREY = _COLOURS[-1]
_PHASE_COLOURS = dict(zip(PHASES, _COLOURS, strict=True))
# Stands for the colour of the page's text.
_INK = "#010203"
_MOST_POINTS = 1200
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_tpu_ext",
    # Names of runs are no formulas.
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _draw(name: str, plot: Callable, height: float = 2.6) -> str:
    """One figure as an SVG element. `plot` is called with its axes."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Not pyplot, which keeps figures and chooses a backend for the whole process.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        plot(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # One page holds several.
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    # As wide as the page lets it be.
    return re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r' height="[\d.]+pt"', "", svg, count=1), count=1)


def _thin(points: Points) -> list[tuple[float, float]]:
    """At most so many points, the least and greatest of each stretch among them."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def _smooth(points: Points) -> list[tuple[float, float]]:
    """A running mean over about a twentieth of the points."""
    weight = min(1.0, 20 / len(points))
    smoothed, mean = [], None
    for step, value in points:
        if math.isfinite(value):
            mean = value if mean is None else mean + weight * (value - mean)
        smoothed.append((step, math.nan if mean is None else mean))
    return smoothed


def draw_curves(
    name: str,
    title: str,
    curves: Mapping[str, Points],
    marked: Mapping[str, Points] | None = None,
    smooth: bool = False,
    over: str = "optimizer step",
) -> str:
    """
    Draw values over optimizer steps or time.

    Args:
        name (`str`):
            Unique name of the figure in its page.
        title (`str`):
            What it shows.
        curves (`Mapping[str, Points]`):
            Curves, by name.
        marked (`Mapping[str, Points]`, *optional*):
            Curves with few points, each of which is marked.
        smooth (`bool`, *optional*, defaults to `False`):
            Whether a running mean is drawn over curves with many points.
        over (`str`, *optional*, defaults to `"optimizer step"`):
            What the values are over.

    Returns:
        `str`: SVG.
    """

    def plot(axes) -> None:
        lines = [*curves.items(), *(marked or {}).items()]
        for index, (label, points) in enumerate(lines):
            colour = _COLOURS[index % len(_COLOURS)]
            is_marked = index >= len(curves) or len(points) == 1
            smoothed = smooth and not is_marked and len(points) >= 200
            axes.plot(
                *zip(*_thin(points), strict=True),
                color=colour,
                alpha=0.3 if smoothed else 1,
                linewidth=0.8 if smoothed else 1.5,
                marker="o" if is_marked else None,
                markersize=3.5,
                label=None if smoothed else label,
            )
            if smoothed:
                axes.plot(*zip(*_thin(_smooth(points)), strict=True), color=colour, label=label)
        axes.set_title(title)
        axes.set_xlabel(over)
        if len(lines) > 1:
            axes.legend()

    return _draw(name, plot)


def draw_step_times(step_times: Mapping[str, Counter[int]]) -> str:
    """
    Draw how many steps took how long, by phase.

    Args:
        step_times (`Mapping[str, Counter[int]]`):
            By phase and class of time, see [`class_of`].

    Returns:
        `str`: SVG.
    """

    def plot(axes) -> None:
        for phase, classes in step_times.items():
            first, last = min(classes), max(classes)
            edges = [1000 * 10 ** (number / CLASSES_PER_DECADE) for number in range(first, last + 2)]
            counts = [classes[number] for number in range(first, last + 1)]
            whole = phase == "total"
            axes.stairs(
                counts,
                edges,
                color=_INK if whole else _PHASE_COLOURS[phase],
                linewidth=2 if whole else 1.2,
                fill=False,
                label="whole step" if whole else phase,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title("Time of a step by phase")
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("steps")
        axes.legend(ncols=2)

    return _draw("step-times", plot, height=3.0)


def draw_phases(phases: Mapping[str, float]) -> str:
    """
    Draw where the time went.

    Args:
        phases (`Mapping[str, float]`):
            Seconds of each phase, in the order in which they are drawn.

    Returns:
        `str`: SVG.
    """
    total = sum(phases.values())

    def plot(axes) -> None:
        left = 0.0
        for phase, seconds in phases.items():
            share = 100 * seconds / total
            label = f"{phase} {share:.1f} %" if share >= 0.05 else None
            axes.barh(0, share, left=left, color=_PHASE_COLOURS[phase], height=0.6, label=label)
            left += share
        axes.set_xlim(0, 100)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.set_title("Where the time went, in % of it")
        axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35))

    return _draw("phases", plot, height=2.0)


def draw_programs(programs: Sequence[tuple[str, float, float, bool]], seconds: float) -> str:
    """
    Draw when programs were compiled.

    Args:
        programs (`Sequence[tuple[str, float, float, bool]]`):
            Of each its name, the seconds since training began when it was there, the seconds that it took, and whether it was
            compiled rather than loaded.
        seconds (`float`):
            How long the run took.

    Returns:
        `str`: SVG.
    """
    rows = list(dict.fromkeys(name for name, *_ in programs))
    unit, size = ("minutes", 60) if seconds >= 180 else ("seconds", 1)

    def plot(axes) -> None:
        for compiled, label in ((True, "compiled"), (False, "loaded from the cache")):
            chosen = [
                (rows.index(name), at, took) for name, at, took, is_compiled in programs if is_compiled == compiled
            ]
            if chosen:
                # A bar that is too thin to be seen is made as wide as a line.
                axes.barh(
                    [row for row, *_ in chosen],
                    [took / size for *_, took in chosen],
                    left=[max(0.0, at - took) / size for _, at, took in chosen],
                    height=0.6,
                    color=_COLOURS[0 if compiled else 2],
                    edgecolor=_COLOURS[0 if compiled else 2],
                    label=label,
                )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlim(0, max(seconds, 1e-3) / size)
        axes.grid(visible=False, axis="y")
        axes.set_title("When programs were compiled")
        axes.set_xlabel(f"{unit} since training began")
        axes.legend()

    return _draw("programs", plot, height=1.4 + 0.28 * len(rows))


def draw_tokens(batches: Mapping[tuple[int, ...], Sequence[int]]) -> str:
    """
    Draw how many of the tokens of each shape of batch are pads.

    Args:
        batches (`Mapping[tuple[int, ...], Sequence[int]]`):
            Number of batches, tokens and padded tokens, by shape.

    Returns:
        `str`: SVG.
    """
    names = [format_size(shape) or "all" for shape in batches]

    def plot(axes) -> None:
        tokens = [counts[1] / 1e6 for counts in batches.values()]
        pads = [(counts[2] - counts[1]) / 1e6 for counts in batches.values()]
        axes.barh(names, tokens, color=_COLOURS[2], height=0.6, label="tokens")
        axes.barh(names, pads, left=tokens, color=_GREY, height=0.6, label="pads")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_title("Tokens by shape of batch")
        axes.set_xlabel("million tokens")
        axes.legend()

    return _draw("tokens", plot, height=1.4 + 0.28 * len(names))
