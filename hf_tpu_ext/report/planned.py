"""What a run's plan said, beside what the run measured."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..formatting import format_bytes, format_number, format_seconds
from .parts import Section, Table
from .record import Run


#: Name of the plan in a run's output directory, as `hf-tpu plan --json OUTPUT_DIR/plan.json` writes it.
PLAN_NAME = "plan.json"
_TITLE = "Planned and measured"
_NEEDED = {"derived", "facts", "parameters", "price", "programs", "token_share", "topology"}
_NEEDED_DERIVED = {
    *{"fits", "mfu", "parts", "peak_bytes", "step", "tokens_per_second"},
    *{"chip_hours_per_million_tokens", "run_dollars", "run_seconds"},
}


def read_plan(path: str | Path) -> dict[str, Any]:
    """
    Read a plan that `hf-tpu plan --json` wrote. Raises `ValueError` where the file cannot be read, or is something
    else.
    """
    fix = "Give a file that `hf-tpu plan --json FILE` wrote."
    try:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {fix}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON. {fix}") from error
    if not isinstance(plan, dict) or not _NEEDED <= plan.keys() or not _NEEDED_DERIVED <= set(plan["derived"]):
        raise UserError(f"{path} is not a plan. {fix}")
    return plan


def compare_if_planned(run: Run, directory: str | Path) -> Section | None:
    """
    [`compare_with_plan`] with the plan in a run's output directory; `None` where there is none. One that cannot be
    read is said, since a report does not depend on it.
    """
    path = Path(directory, PLAN_NAME)
    if not path.is_file():
        return None
    try:
        return compare_with_plan(run, read_plan(path))
    except ValueError as error:
        return Section(_TITLE, [str(error)])


def compare_with_plan(run: Run, plan: Mapping[str, Any]) -> Section:
    """
    Put what was planned, see [`read_plan`], beside what a run measured, in a table. What either does not know is left
    empty. Where the plan is of another model or other chips, a line says so, and there is no table.
    """
    chip, backend = plan["topology"]["chip"], run.begin["backend"]
    model, chips = run.begin["model"], math.prod(plan["topology"]["layout"])
    section = Section(
        _TITLE,
        [
            f"Planned: {plan['facts']['model']}, for {plan['topology']['name']} ({chips} of {chip['title']}). Run: "
            f"{model['name']}, {model['parameters']:,} parameters, {model['trained']:,} trained, on {backend['chips']} of "
            f"{backend['device']}."
        ],
    )
    others = []
    # Tokens that a run adds make its model a little larger.
    counts = zip(plan["parameters"] or (), (model["parameters"], model["trained"]), strict=False)
    if not all(math.isclose(*pair, rel_tol=0.01) for pair in counts):
        others.append("another model")
    if (chip["title"], chips) != (backend["device"], backend["chips"]):
        others.append("other chips")
    if others:
        section.lines.append(
            f"They are not compared: the plan's memory and times are those of {' and '.join(others)}. Plan what was run: hf-tpu plan "
            "RECIPE --topology TOPOLOGY --json FILE"
        )
        return section
    memory, seconds = run.peak_memory, run.middle("step_time")
    rate, utilization = run.middle("padded_tokens_per_second"), run.middle("mfu")
    tokens, all_tokens = (sum(counts[index] for counts in run.batches.values()) for index in (1, 2))
    measured = _figures(
        memory,
        None if seconds is None else (seconds,),
        rate and rate / backend["chips"],
        utilization,
        utilization and utilization * tokens / all_tokens,
        run.programs,
    )
    rows = [[name, planned, measured[name]] for name, planned in expected_figures(plan).items()]
    section.tables.append(Table(["", "planned, for the longest batch", "measured, at the median"], rows))
    return section


def expected_figures(plan: Mapping[str, Any]) -> dict[str, str]:
    """What a plan expects, by what it is. What it does not know is empty."""
    estimates, share = plan["derived"], plan["token_share"]
    step, mfu = estimates["step"], estimates["mfu"]
    return _figures(
        estimates["peak_bytes"],
        step and step["seconds"],
        estimates["tokens_per_second"],
        mfu,
        mfu and share and mfu * share,
        plan["programs"],
    )


def _figures(
    memory: int | None,
    seconds: Sequence[float] | None,
    rate: float | None,
    mfu: float | None,
    mfu_without_padding: float | None,
    programs: Sequence[Any],
) -> dict[str, str]:
    return {
        "peak HBM per chip": "" if memory is None else format_bytes(memory),
        "optimizer step": format_span(seconds, format_seconds),
        "tokens/s/chip, with padding": "" if rate is None else format_number(rate),
        "MFU, with padding": _percent(mfu),
        "MFU, without padding": _percent(mfu_without_padding),
        "graphs": str(len(programs)),
    }


def format_span(ends: Sequence[float] | None, words: Callable[[float], str]) -> str:
    """The ends of a range, or the one that they are; nothing, where they are not known."""
    return " to ".join(dict.fromkeys(map(words, ends or ())))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3g} %"
