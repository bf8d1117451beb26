"""What a run's plan said, beside what the run measured."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..formatting import format_bytes, format_number, format_seconds
from .parts import Section, Table
from .record import Run


#: Name of the plan in a run's output directory, as `hf-tpu plan --json OUTPUT_DIR/plan.json` writes it.
PLAN_NAME = "plan.json"
_TITLE = "Planned and measured"
_NEEDED = {"derived", "facts", "programs", "token_share", "topology"}
_NEEDED_DERIVED = {"mfu", "peak_bytes", "step", "tokens_per_second"}


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
    estimates, chip, backend = plan["derived"], plan["topology"]["chip"], run.begin["backend"]
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
    # Plans of earlier versions have no numbers. Tokens that a run adds make its model a little larger.
    counts = zip(plan.get("parameters") or (), (model["parameters"], model["trained"]), strict=False)
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
    step, mfu, share = estimates["step"], estimates["mfu"], plan["token_share"]
    planned_step = "" if step is None else " to ".join(dict.fromkeys(map(format_seconds, step["seconds"])))
    rows = [
        _row("peak HBM per chip", estimates["peak_bytes"], memory, format_bytes),
        ["optimizer step", planned_step, "" if seconds is None else format_seconds(seconds)],
        _row(
            "tokens/s/chip, with padding",
            estimates["tokens_per_second"],
            rate and rate / backend["chips"],
            format_number,
        ),
        _row("MFU, with padding", mfu, utilization, _percent),
        _row(
            "MFU, without padding",
            mfu and share and mfu * share,
            utilization and utilization * tokens / all_tokens,
            _percent,
        ),
        ["graphs", str(len(plan["programs"])), str(len(run.programs))],
    ]
    section.tables.append(Table(["", "planned, for the longest batch", "measured, at the median"], rows))
    return section


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _row(name: str, plan_value: float | None, run_value: float | None, words: Callable) -> list[str]:
    return [name, *("" if value is None else words(value) for value in (plan_value, run_value))]
