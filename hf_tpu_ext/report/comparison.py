"""What the report of several runs says, or of several plans."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..formatting import format_bytes, format_seconds
from ..hardware.prices import Price
from .figures import HOW_TO_DRAW, can_draw, draw_curves, draw_shares
from .metrics import PHASES, RESULTS
from .parts import Report, Section, Table
from .planned import expected_figures, format_span
from .record import Run, points
from .sections import (
    begin_time,
    compilations_of,
    datasets_of,
    headline,
    notes_on,
    take_some,
    time_in_phases,
    time_of_step,
)


def compare_runs(runs: Sequence[Run], prices: Mapping[str, Price]) -> Report:
    """Put together how runs differ, with prices by kind of chip."""
    names = [run.name for run in runs]
    section = Section("Training", [] if can_draw() else [f"{HOW_TO_DRAW} again."])
    if can_draw():
        for title, keys in {
            **RESULTS,
            "gradient norm": ("grad_norm",),
            "learning rate": ("learning_rate",),
            "tokens per second": ("tokens_per_second",),
        }.items():
            curves = {run.name: values for run in runs if (values := run.values_of(keys))}
            if curves:
                section.figures.append(draw_curves(title.capitalize(), curves))
        by_minutes = {run.name: [(at / 60, loss) for at, loss in points(run.logs, "loss", "at")] for run in runs}
        if all(by_minutes.values()):
            section.figures.insert(1, draw_curves("Loss over time", by_minutes, over="minutes of training"))
    section.tables += _losses(runs)
    others = [
        {
            "begun": begin_time(run.sessions[0]),
            "model": run.begin["model"]["name"],
            "parameters": f"{run.begin['model']['parameters']:,}",
            "trained": f"{run.begin['model']['trained']:,}",
            **datasets_of(run),
            "device": run.begin["backend"]["device"],
            "chips": run.begin["backend"]["chips"],
            **run.begin["versions"],
        }
        for run in runs
    ]
    of_step = [{name: format_seconds(seconds) for name, seconds in time_of_step(run).items()} for run in runs]
    # A run may lack a phase. The whole step is none, and comes last.
    rows = sorted(_rows(of_step), key=lambda row: [*PHASES, row[0]].index(row[0]))
    speed = _beside("Mean time of a step", names, rows)
    if can_draw() and all(map(time_in_phases, runs)):
        speed.figures.append(draw_shares({run.name: time_in_phases(run) for run in runs}))
    arguments = [run.begin["arguments"] for run in runs]
    # Of an adapter, only what was set is recorded.
    of_adapters = {name: "default" for each in arguments for name in each if name.startswith("peft_config.")}
    recipes = _rows([(of_adapters if of_adapters.keys() & each.keys() else {}) | each for each in arguments])
    # Where runs were written is in their names.
    differing = [row for row in recipes if len(set(row[1:])) > 1 and row[0] != "output_dir"]
    differences = _beside("Differences of the recipes", names, differing)
    if not differences.tables:
        differences.lines.append("None.")
    sections = [
        Section("Notes", [f"{run.name}: {note}" for run in runs for note in notes_on(run)]),
        _beside("Results", names, _rows([headline(run, prices) for run in runs])),
        section,
        _samples(runs),
        speed,
        _beside("Compilations", names, _rows([compilations_of(run) for run in runs])),
        differences,
        _beside("Runs", names, _rows(others)),
    ]
    return Report(f"{len(runs)} runs", ", ".join(names), {}, sections)


def compare_plans(names: Sequence[str], plans: Sequence[Mapping[str, Any]]) -> Report:
    """Put together how plans differ, see [`~hf_tpu_ext.report.planned.read_plan`]; each has a name."""
    expected = [
        {
            "on": plan["topology"]["name"],
            "fits": {True: "yes", False: "no", None: "unknown"}[plan["derived"]["fits"]],
            **expected_figures(plan),
            "time of the run": format_span(plan["derived"]["run_seconds"], format_seconds),
            "cost of the run": format_span(plan["derived"]["run_dollars"], "${:,.2f}".format),
            "cost of a million tokens, with padding": _cost_of_tokens(plan),
            **_beside_the_run(plan),
        }
        for plan in plans
    ]
    parts = [{name: format_bytes(size) for name, size in (plan["derived"]["parts"] or {}).items()} for plan in plans]
    sections = [
        _beside("Expected, for the longest batch", names, _rows(expected)),
        _beside("Peak HBM per chip", names, _rows(parts)),
        _beside("Settings", names, _rows([plan["facts"] for plan in plans])),
    ]
    return Report(f"{len(plans)} plans", ", ".join(names), {}, sections)


def _cost_of_tokens(plan: Mapping[str, Any]) -> str:
    hours, price = plan["derived"]["chip_hours_per_million_tokens"], plan["price"]
    return "" if hours is None or price is None else f"${hours * price['dollars_per_chip_hour']:.3g}"


def _beside_the_run(plan: Mapping[str, Any]) -> dict[str, str]:
    """What a plan says besides the run as it is set: the reference's step before it, and the fastest variant of a search."""
    found = {}
    if (reference := plan["derived"].get("reference")) is not None:
        found["reference step, before the run"] = format_span(reference["seconds"], format_seconds)
    trials = [trial for trial in plan["trials"] if trial["fits"] and trial["tokens_per_second"]]
    if trials:
        best = max(trials, key=lambda trial: trial["tokens_per_second"])
        settings = ", ".join(f"{name}: {value}" for name, value in best["settings"].items())
        found["fastest of the search"] = (
            f"{best['tokens_per_second']:,.0f} tokens/s/chip, {format_bytes(best['peak_bytes'])}: {settings}"
        )
    return found


def _losses(runs: Sequence[Run]) -> list[Table]:
    """The loss at some of the steps at which each run has logged it."""
    of_runs = [dict(points(run.logs, "loss")) for run in runs]
    steps = [step for step in of_runs[0] if all(step in losses for losses in of_runs)]
    rows = [[f"{step:,}", *(f"{losses[step]:.4g}" for losses in of_runs)] for step in take_some(steps)]
    return [Table(["step", *(run.name for run in runs)], rows, "Loss at some steps")] if rows else []


def _samples(runs: Sequence[Run]) -> Section:
    """What each run answers after training, to the prompts that all were shown."""
    answers = [{sample["prompt"]: sample["after"] for sample in run.samples if "after" in sample} for run in runs]
    shared = [prompt for prompt in answers[0] if all(prompt in of_run for of_run in answers)]
    rows = [[prompt, *(of_run[prompt] for of_run in answers)] for prompt in shared]
    return _beside("Samples", [run.name for run in runs], rows, "prompt")


def _beside(title: str, names: Sequence[str], rows: list[list[str]], what: str = "") -> Section:
    """A section with a table that has a column for each run or plan, if it has rows."""
    return Section(title, tables=[Table([what, *names], rows)] if rows else [])


def _rows(values: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a table: names, and the value that each run or plan has."""
    names = dict.fromkeys(name for of_one in values for name in of_one)
    return [[name, *(_words(of_one.get(name, "")) for of_one in values)] for name in names]


def _words(value: Any) -> str:
    """A value as text. A number of steps is one, whether it was read from YAML or is upstream's default, which is a float."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
