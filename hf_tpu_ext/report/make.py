"""Making the report of a run, or of several."""

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from ..atomic_write import write_atomically
from ..errors import UserError
from ..hardware.prices import PRICES, read_prices
from .comparison import compare_runs
from .planned import compare_if_planned, compare_with_plan, read_plan
from .record import read_run
from .sections import describe_run


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
)
# Text that Markdown does not take for its own signs, on one line.
_TEMPLATES.filters["plain"] = lambda text: re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def make_report(
    directories: Sequence[str | Path],
    output_dir: str | Path | None = None,
    prices: str | Path = PRICES,
    plan: str | Path | None = None,
) -> Path:
    """
    Write the report of a run, or how several differ.

    Args:
        directories (`Sequence[str | Path]`):
            Output directories of the runs.
        output_dir (`str` or `Path`, *optional*):
            Where to write it, by default the directory of the run; for several the current directory. It is made if need be.
        prices (`str` or `Path`, *optional*):
            File of prices, see [`read_prices`].
        plan (`str` or `Path`, *optional*):
            Plan of the run, see [`read_plan`]; by default the one in its output directory, if there is one.

    Returns:
        `Path`: The web page. The same as Markdown is beside it.

    Raises:
        `ValueError`: A directory holds no run, `plan` is no plan or is given with several runs, or the report cannot be
            written.
    """
    if plan is not None and len(directories) > 1:
        raise UserError(
            f"--plan {plan} is of one run, and {len(directories)} are given: hf-tpu report {directories[0]} --plan {plan}"
        )
    runs = [read_run(directory) for directory in directories]
    known = read_prices(prices)
    if len(runs) == 1:
        planned = (
            compare_if_planned(runs[0], directories[0])
            if plan is None
            else compare_with_plan(runs[0], read_plan(plan))
        )
        report, name = describe_run(runs[0], known, planned), "report"
        output_dir = directories[0] if output_dir is None else output_dir
    else:
        report, name = compare_runs(runs, known), "comparison"
        output_dir = "." if output_dir is None else output_dir
    page = Path(output_dir, f"{name}.html")
    for path in (page, page.with_suffix(".md")):
        _write(path, _TEMPLATES.get_template(f"report{path.suffix}").render(report=report))
    return page


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}). Make room or name another directory: --output_dir DIR"
        ) from error
