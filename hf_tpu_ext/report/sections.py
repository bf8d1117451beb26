"""What the report of a run says."""

import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..formatting import count, count_each, format_bytes, format_number, format_seconds, format_size, kind_of_device
from ..hardware.prices import Price
from ..hardware.topologies import find_chip
from .figures import HOW_TO_DRAW, can_draw, draw_curves, draw_mean_step, draw_shares, draw_step_times
from .metrics import BESIDES_STEPS, ELSEWHERE, GROUPS, MORE_NAMES, PHASES, RESULTS, column
from .parts import Report, Section, Table
from .record import Run, Session, points


# The section on training shows these of what was logged.
_NAMES = [*(name for _, labels in GROUPS for name in labels), *MORE_NAMES]


def describe_run(run: Run, prices: Mapping[str, Price], plan_section: Section | None = None) -> Report:
    """Put together what is known of a run, with prices by kind of chip, and what was planned beside what was measured."""
    how_to_draw = [] if can_draw() else [f"{HOW_TO_DRAW}: hf-tpu report {shlex.quote(run.name)}"]
    sections = [
        Section("Notes", [*how_to_draw, *notes_on(run)]),
        _parts(run),
        _curves(run),
        _samples(run),
        _other_metrics(run),
        _speed(run),
        _programs(run),
        _tokens(run),
        _cost(run, prices),
        *([] if plan_section is None else [plan_section]),
        _recipe(run),
        _versions(run),
    ]
    backend = run.begin["backend"]
    # Records of earlier versions do not say.
    hosts, processes = backend.get("hosts", 1), backend.get("processes", 1)
    where = f" on {hosts} hosts" if hosts > 1 else f" in {processes} processes" if processes > 1 else ""
    chips = count(backend["chips"], kind_of_device(backend["name"]))
    return Report(
        title=run.begin["model"]["name"] or run.name,
        subtitle=f"{run.name}, on {chips} of {backend['device']}{where}, begun {begin_time(run.sessions[0])}",
        headline=headline(run, prices),
        sections=sections,
    )


def headline(run: Run, prices: Mapping[str, Price]) -> dict[str, str]:
    """The numbers to see first, by what they are. What is not known is left out."""
    numbers = {}
    for name, keys in RESULTS.items():
        if logged := run.values_of(keys):
            steps, values = zip(*dict.fromkeys((logged[0], logged[-1])), strict=True)
            steps = f"step{'s' if len(steps) > 1 else ''} {' → '.join(f'{step:,}' for step in steps)}"
            numbers[name] = f"{' → '.join(f'{value:.3g}' for value in values)} ({steps})"
    numbers["steps"] = f"{run.steps:,} of {run.begin['max_steps']:,}"
    numbers["time"] = format_seconds(run.seconds)
    for name, key, words in (
        ("median tokens / s", "tokens_per_second", format_number),
        ("median time of a step", "step_time", format_seconds),
        ("median MFU", "mfu", lambda share: f"{format_number(100 * share)} %"),
    ):
        if (middle := run.middle(key)) is not None:
            numbers[name] = words(middle)
    if run.batches:
        _, tokens, all_tokens = map(sum, zip(*run.batches.values(), strict=True))
        numbers["padding"] = f"{100 * (1 - tokens / all_tokens):.1f} %"
    if run.programs:
        numbers["compilations"] = (
            f"{len(run.programs)} in {format_seconds(sum(one['seconds'] for one in run.programs))}"
        )
    if (memory := run.peak_memory) is not None:
        numbers["peak memory"] = format_bytes(memory)
    if (cost := _price(run, prices)) is not None:
        numbers["cost so far"] = f"${cost[1]:,.2f}"
    return numbers


def notes_on(run: Run) -> list[str]:
    """What a person has to know about a run to read its numbers: what ended it, what is missing."""
    notes = []
    if (error := run.sessions[-1].error) is not None:
        # Gloo's words, in each process that is left.
        is_lost = "closed by peer" in error or "reset by peer" in error
        lost = "; another process was lost, as its launcher has printed" if is_lost else ""
        notes.append(f"The run was ended after step {run.steps:,} by {error}{lost}")
    elif run.sessions[-1].end is None:
        notes.append("The run did not end, or is still going on. This is what was recorded until then.")
    else:
        if run.steps < run.begin["max_steps"]:
            # Records of earlier versions do not say.
            by = run.sessions[-1].end.get("stopped_by", "a callback (early stopping is one) or a signal")
            notes.append(f"Training stopped after step {run.steps:,} of {run.begin['max_steps']:,}, by {by}.")
        if (best := run.sessions[-1].end.get("best_step")) is not None:
            metric = f"eval_{run.sessions[-1].end['best_by'].removeprefix('eval_')}"
            values = [f" ({log[metric]:.3g})" for log in run.evaluations if log["step"] == best and metric in log]
            notes.append(
                f"The weights of step {best:,}, the best by {metric}{''.join(values)}, were loaded at the end "
                "(load_best_model_at_end)."
            )
    for before, after in pairwise(run.sessions):
        last, first = before.last_step, after.begin["first_step"]
        # What a run did after its last line, before it was killed, is not known.
        is_known = before.end is not None or before.error is not None
        if last > first or not is_known:
            was_ended = (
                f"ended after step {last:,}" if is_known else f"killed after step {max(last, first):,} or later"
            )
            notes.append(
                f"The run was {was_ended}, and resumed after step {first:,}: the steps between were run again."
            )
        elif after.last_step > first:
            notes.append(
                f"The run ended after step {first:,}, and was resumed: the first log since may be the mean of fewer steps than others."
            )
    if run.begin["arguments"].get("step_status") is False:
        notes.append(
            "Times of steps and phases, tokens per second, padding and memory were not measured: step_status is false."
        )
    bad = sum(not math.isfinite(log.get("loss", 0.0)) for log in run.logs)
    if bad:
        notes.append(f"The loss was not finite in {count(bad, 'log')}.")
    if run.unreadable:
        notes.append(f"Skipped unreadable lines of run.jsonl: {run.unreadable:,}.")
    return notes


def _parts(run: Run) -> Section:
    section = Section("Parts")
    if len(run.sessions) == 1:
        return section
    section.lines.append(
        "Sums over the run are of all its parts, steps that were run again included, but for what one that failed or was killed "
        "did after its last log or checkpoint. Curves and logs have each step once. The first log of a part is the mean of the steps "
        "since its beginning, which may be fewer than those of others."
    )
    rows = []
    for session in run.sessions:
        counters = session.totals.get("counters") or {}
        if session.error is not None:
            end = "failed"
        elif session.end is None:
            end = "did not end"
        elif session.last_step < session.begin["max_steps"]:
            end = f"stopped by {session.end.get('stopped_by', 'a callback or a signal')}"
        else:
            end = "ended"
        rows.append(
            [
                begin_time(session),
                f"{session.begin['first_step']:,}",
                # A run may be resumed for another number of steps.
                f"{session.last_step:,} of {session.begin['max_steps']:,}",
                format_seconds(session.seconds),
                f"{session.compilations:,}",
                *(_cell(counters.get(name)) for name in ("executions", "replays")),
                end,
            ]
        )
    columns = ["begun", "after step", "to step", "time", "compilations", "executions", "replayed", ""]
    section.tables.append(Table(columns, rows))
    return section


def take_some(values: Sequence[Any]) -> list[Any]:
    """About ten of some values, the last among them."""
    return [*values[: -1 : max(1, len(values) // 10)], *values[-1:]]


def _curves(run: Run) -> Section:
    section = Section("Training")
    if can_draw():
        for title, labels in GROUPS:
            training, held_out = (
                {label: values for name, label in labels.items() if (values := points(logs, prefix + name))}
                for logs, prefix in ((run.logs, ""), (run.evaluations, "eval_"))
            )
            if training or held_out:
                section.figures.append(draw_curves(title, training, held_out))
    for title, logs, prefix in (("Some of the logs", run.logs, ""), ("Evaluations", run.evaluations, "eval_")):
        # Callbacks have written the logs without a loss.
        if logs := [log for log in logs if prefix + "loss" in log]:
            if not prefix:
                logs = take_some(logs)
            columns = [name for name in _NAMES if any(prefix + name in log for log in logs)]
            rows = [[_cell(log.get(key)) for key in ("step", *(prefix + name for name in columns))] for log in logs]
            section.tables.append(Table(["step", *map(column, columns)], rows, title))
    if not section.tables:
        section.lines.append("Nothing was logged: the run is shorter than logging_steps.")
    return section


def _other_metrics(run: Run) -> Section:
    """What no other section shows of the logs: what callbacks and `compute_metrics` add, and more of upstream's."""
    section = Section("Other metrics")
    logs = sorted([*run.logs, *run.evaluations], key=lambda log: log["step"])
    shown = {prefix + name for prefix in ("", "eval_") for name in _NAMES}
    last = {
        name: [name, _cell(log["step"]), _cell(value)]
        for log in logs
        for name, value in log.items()
        if name not in shown and not ELSEWHERE.fullmatch(name)
    }
    if last:
        section.tables.append(Table(["metric", "step", "last value"], list(last.values())))
    if can_draw():
        for name in dict.fromkeys(name.removeprefix("eval_") for name in last):
            training, held_out = (
                {name: values} if len(values := points(logs, prefix + name)) > 1 else {} for prefix in ("", "eval_")
            )
            # One point is in the table.
            if training or held_out:
                section.figures.append(draw_curves(name if training else f"eval_{name}", training, held_out))
    return section


def _samples(run: Run) -> Section:
    section = Section("Samples")
    if run.samples:
        columns = list(run.samples[0])
        rows = [[_cell(sample.get(name)) for name in columns] for sample in run.samples]
        section.tables.append(Table(columns, rows))
    return section


def _cell(value: Any) -> str:
    return "" if value is None else format_number(value) if isinstance(value, int | float) else str(value)


def time_in_phases(run: Run) -> dict[str, float]:
    """Seconds of the phases that a run had."""
    return {name: run.phases[name] for name in PHASES if run.phases[name] > 0}


# Phases have a "step", too.
_WHOLE_STEP = "whole step (mean)"


def time_of_step(run: Run) -> dict[str, float]:
    """Seconds that each phase takes of a step, as the mean over all steps, also those without it, and last their sum."""
    phases, steps = time_in_phases(run), run.steps_in_phases
    if not (phases and steps):
        return {}
    of_step = {name: seconds / steps for name, seconds in phases.items() if name not in BESIDES_STEPS}
    return {**of_step, _WHOLE_STEP: sum(of_step.values())}


def _speed(run: Run) -> Section:
    section = Section("Speed")
    phases = time_in_phases(run)
    total, per_step = sum(phases.values()), time_of_step(run)
    if not total:
        return section
    section.lines.append(
        "Phases are what the host does. Execution is asynchronous, so device time shows only where the host waits for it."
    )
    if can_draw():
        section.figures.append(draw_shares({"": phases}))
        if per_step:
            section.figures.append(draw_mean_step(per_step))
        # Of a run that ended early, no step may have been timed.
        if run.step_times.get("total"):
            section.figures.append(draw_step_times(run.step_times["total"]))
        rates = {
            "tokens": points(run.logs, "tokens_per_second"),
            "with padding": points(run.logs, "padded_tokens_per_second"),
        }
        if all(rates.values()):
            section.figures.append(draw_curves("Tokens per second", rates))
    means = {name: format_seconds(seconds) for name, seconds in per_step.items()}
    rows = [
        [name, PHASES[name], format_seconds(seconds), f"{100 * seconds / total:.1f} %", means.get(name, "")]
        for name, seconds in phases.items()
    ]
    if means:
        without = "all phases of steps: without " + ", ".join(BESIDES_STEPS)
        rows.append([_WHOLE_STEP, without, "", "", means[_WHOLE_STEP]])
    section.tables.append(Table(["phase", "the host", "time", "share", "mean over all steps"], rows))
    return section


def compilations_of(run: Run) -> dict[str, str]:
    """What a run has compiled, for the first time and again, with the causes, and why its steps were not replayed."""
    lines, again = {}, [one for one in run.programs if one["cause"]]
    if run.programs:
        lines["first compilations"] = count_each((one["kind"] for one in run.programs if not one["cause"]), most=8)
    if again:
        seconds = format_seconds(sum(one["seconds"] for one in again))
        lines["recompilations"] = f"{len(again)} in {seconds}: {count_each(one['cause'] for one in again)}"
    if run.why_traced is not None:
        lines["step replay"] = f"off: {run.why_traced}"
    if run.syncs:
        lines["device-to-host syncs"] = "; ".join(run.syncs)
    if run.counters["executions"]:
        lines["executions"] = f"{run.counters['executions']:,}, {run.counters['replays']:,} of them replayed"
    return lines


def _programs(run: Run) -> Section:
    section = Section("Compilations")
    if run.programs:
        rows = [
            [
                one["kind"],
                format_size(one["shape"]),
                str(one["step"]),
                format_seconds(one["at"]),
                format_seconds(one["seconds"]),
                "compiled" if one["compiled"] else "loaded",
                one["cause"] or "",
            ]
            for one in run.programs
        ]
        section.tables.append(
            Table(["graph", "batch", "step", "after", "compile time", "source", "cause of recompilation"], rows)
        )
        # Records of earlier versions have none.
        section.lines += dict.fromkeys(filter(None, (one.get("advice") for one in run.programs)))
    if run.why_traced is not None:
        section.lines.append(f"Step replay is off: {run.why_traced}.")
    if run.syncs:
        section.lines.append(f"Device-to-host syncs outside this package: {'; '.join(run.syncs)}.")
    counters = run.counters
    if counters["executions"]:
        section.lines.append(
            f"{count(counters['executions'], 'execution')}, {counters['replays']:,} of them replayed; "
            f"{count(counters['reads'], 'device-to-host transfer')} and {count(counters['fallbacks'], 'CPU fallback')}, "
            "including evaluation, logs and checkpoints."
        )
    caches = [session.end["cache"] for session in run.sessions if session.end is not None]
    for cache in filter(None, caches[-1:]):
        section.lines.append(
            f"Compilation cache {cache['directory']}: {count(cache['hits'], 'hit')}, {cache['misses']:,} misses, "
            f"{count(cache['programs'], 'executable')} in {cache['size'] / 2**20:,.1f} MiB."
        )
    return section


def _tokens(run: Run) -> Section:
    section = Section("Tokens")
    if not run.batches:
        return section
    counts_of = {format_size(shape) or "all": counts for shape, counts in sorted(run.batches.items())}
    if len(counts_of) > 1:
        counts_of["all"] = [sum(column) for column in zip(*counts_of.values(), strict=True)]
    rows = [
        [name, f"{number:,}", f"{tokens:,}", f"{all_tokens - tokens:,}", f"{100 * (1 - tokens / all_tokens):.1f} %"]
        for name, (number, tokens, all_tokens) in counts_of.items()
    ]
    section.tables.append(Table(["batch", "batches", "tokens", "padding", "share of padding"], rows))
    advice = run.begin["facts"]["token_waste"]
    if advice:
        section.lines.append(f"Before the run: {advice}")
    return section


def _price(run: Run, prices: Mapping[str, Price]) -> tuple[Price, float] | None:
    """The price of the chip that a run is on, and what the run has cost, where it is known."""
    chip = find_chip(run.begin["backend"]["device"])
    if chip is None or chip.name not in prices:
        return None
    hours = sum(session.seconds * session.begin["backend"]["chips"] for session in run.sessions) / 3600
    return prices[chip.name], hours * prices[chip.name].dollars_per_chip_hour


def _cost(run: Run, prices: Mapping[str, Price]) -> Section:
    section = Section("Memory and cost")
    if (memory := run.peak_memory) is not None:
        limit = run.begin["backend"]["memory_per_chip"]
        of = "of the process" if limit is None else f"of the {format_bytes(limit)} of usable HBM of a chip"
        section.lines.append(f"At most {format_bytes(memory)} {of} were in use.")
    if (cost := _price(run, prices)) is None:
        section.lines.append(
            f"No price of {run.begin['backend']['device']} is known, so there is no cost. Prices of your own: hf-tpu report "
            f"{shlex.quote(run.name)} --prices FILE."
        )
    else:
        price, dollars = cost
        section.lines.append(
            f"${dollars:,.2f} so far, from the beginning to the end of training: ${price.dollars_per_chip_hour:g} a "
            f"chip and hour, {price.region}, {price.date} ({price.source})."
        )
    return section


def begin_time(session: Session) -> str:
    """When a run began, or was resumed."""
    return session.begin["time"].replace("T", " ").replace("+00:00", " UTC")


def datasets_of(run: Run) -> dict[str, str]:
    """Names, where they have some, and rows of the datasets of a run."""
    # Records of earlier versions do not have the names.
    names = run.begin.get("datasets", {})
    return {
        split: f"{names[split]}, {count(rows, 'row')}" if names.get(split) else count(rows, "row")
        for split, rows in run.begin["rows"].items()
    }


def _recipe(run: Run) -> Section:
    begin, model = run.begin, run.begin["model"]
    section = Section("Recipe")
    share = 100 * model["trained"] / max(1, model["parameters"])
    section.lines.append(
        f"{model['name']}: {model['parameters']:,} parameters, {model['trained']:,} trained ({share:.3g} %); "
        f"{begin['facts']['precision']}."
    )
    section.lines += [f"{name}: {rows}." for name, rows in datasets_of(run).items()]
    section.lines += begin["facts"]["changes"]
    arguments = begin["arguments"]
    section.tables.append(
        Table(["set", "value"], [[name, str(arguments[name])] for name in begin["changed"] if name in arguments])
    )
    everything = [[name, str(value)] for name, value in sorted(arguments.items())]
    section.tables.append(Table(["argument", "value"], everything, "All arguments"))
    return section


def _versions(run: Run) -> Section:
    backend = run.begin["backend"]
    rows = [*run.begin["versions"].items(), ("device", f"{backend['name']}, {backend['device']}: {backend['reason']}")]
    return Section("Versions", tables=[Table(["what", "which"], [list(row) for row in rows])])
