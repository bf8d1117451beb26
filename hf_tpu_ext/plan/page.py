"""A plan as a page of text."""

import textwrap

from ..words import format_bytes, format_size
from .result import FLOPS_RATIO, Plan
from .roofline import BASIS


WIDTH = 100
_BAR = 40
_LABEL = 28


def render(plan: Plan) -> str:
    """
    Write a plan as a page of text of at most 100 columns.

    Args:
        plan ([`Plan`]):
            The plan.

    Returns:
        `str`: The page, without a newline at its end.
    """
    topology = plan.topology
    chips = f"{topology.num_chips} chip{'s' if topology.num_chips > 1 else ''}"
    sections = [
        [f"{plan.title} on {topology.name}: {chips} of {topology.chip.title}, one host"],
        [line for name, value in plan.facts.items() for line in _fact(name, value)],
        _verdict(plan),
        _memory(plan),
        _programs(plan),
        _step(plan),
        _run(plan),
        _trials(plan),
        _listed("what to change", plan.advice),
        _listed("not known", plan.unknowns),
        [line for name, value in _made_by(plan).items() for line in _fact(name, value)],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def format_count(number: float) -> str:
    """
    A large number for people.

    Args:
        number (`float`):
            The number.

    Returns:
        `str`: E.g. `"22.6 T"`, `"596 M"`.
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number:.3g} "


def format_seconds(seconds: float) -> str:
    """
    A time for people.

    Args:
        seconds (`float`):
            The time.

    Returns:
        `str`: E.g. `"0.18 ms"`, `"184 ms"`, `"95 s"`, `"12 min"`, `"3.2 h"`.
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.3g} h"


def _fact(name: str, value: str) -> list[str]:
    return textwrap.wrap(f"{name:<{_LABEL}}{value}", WIDTH, subsequent_indent=" " * _LABEL, break_on_hyphens=False)


def _listed(title: str, items: list[str]) -> list[str]:
    lines = [
        line
        for item in items
        for line in textwrap.wrap(item, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    ]
    return [title, *lines] if lines else []


def _verdict(plan: Plan) -> list[str]:
    limit = plan.topology.chip.memory_bytes
    has = f"{format_bytes(limit)} that the compiler lets a program use"
    if plan.fits is None:
        lines = ["COULD NOT TELL whether it fits: the programs were not compiled."]
        if plan.estimate is not None:
            than = "less" if plan.estimate.peak_bytes <= limit else "more"
            lines.append(
                f"By an estimate a chip holds {format_bytes(plan.estimate.peak_bytes)}, {than} than the {has}."
            )
    elif plan.fits:
        spare = format_bytes(limit - plan.peak_bytes)
        lines = [f"FITS: a chip holds {format_bytes(plan.peak_bytes)} of the {has}; {spare} to spare."]
    elif plan.excess_bytes is not None:
        lines = [f"DOES NOT FIT: a chip needs {format_bytes(plan.excess_bytes)} more than the {has}."]
    elif plan.peak_bytes is not None and plan.peak_bytes > limit:
        over = format_bytes(plan.peak_bytes - limit)
        lines = [f"DOES NOT FIT: a chip holds {format_bytes(plan.peak_bytes)}, {over} more than the {has}."]
    else:
        lines = ["DOES NOT FIT."]
    lines = [line for text in lines for line in textwrap.wrap(text, WIDTH)]
    for program in plan.programs:
        if program.error is not None:
            shape = format_size(program.batch_shape)
            lines += _fact(f"{program.kind}, {shape}", f"the compiler says: {' '.join(program.error.split())[:600]}")
    return lines


def _memory(plan: Plan) -> list[str]:
    limit = plan.topology.chip.memory_bytes
    if plan.largest is not None:
        shape = format_size(plan.largest.batch_shape)
        title, parts = f"memory of a chip, at most (during: {plan.largest.kind}, {shape})", plan.parts(plan.largest)
    elif plan.estimate is not None:
        title, parts = "memory of a chip, ESTIMATED without the compiler", plan.estimate.parts
    else:
        return []
    # Longer bars only where a program does not fit.
    scale = _BAR / max(limit, sum(parts.values()))
    lines, before = [title], 0
    for name, size in parts.items():
        start, end = round(before * scale), round((before + size) * scale)
        bar = "." * start + "#" * (end - start) + "." * (round(limit * scale) - end)
        lines.append(f"  {name:<{_LABEL - 2}}{format_bytes(size):>10}  {bar}")
        before += size
    total = f"  {'together':<{_LABEL - 2}}{format_bytes(before):>10}"
    return [*lines, f"{total}  of {format_bytes(limit)}: {100 * before / limit:.0f} %"]


def _programs(plan: Plan) -> list[str]:
    if not plan.programs:
        return []
    lines = [
        f"{'programs':<{_LABEL}}{'batch':>12}{'compiled in':>14}{'arithmetic':>15}{'memory traffic':>16}{'sent':>12}"
    ]
    for program in plan.programs:
        shape = format_size(program.batch_shape)
        line = f"  {program.kind:<{_LABEL - 2}}{shape:>12}{format_seconds(program.seconds):>14}"
        if (cost := program.cost) is not None:
            line += f"{format_count(cost.matrix_flops) + 'FLOP':>15}"
            line += f"{format_bytes(cost.memory_bytes):>16}{format_bytes(cost.link_bytes):>12}"
        else:
            line += "  refused"
        lines.append(line)
        if cost is not None and cost.exchanges:
            told = [f"{item.count} {item.kind} of {format_bytes(item.num_bytes)}" for item in cost.exchanges]
            lines += textwrap.wrap(", ".join(told), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return [*lines, "  each of one chip and one run; loops counted by their turns"]


def _step(plan: Plan) -> list[str]:
    roofline = plan.roofline
    if roofline is None:
        return []
    fast, slow = roofline.expected_seconds
    walls = f"arithmetic {format_seconds(roofline.arithmetic)}, memory {format_seconds(roofline.memory)}"
    if plan.topology.num_chips > 1:
        walls += f", links {format_seconds(roofline.links)}"
    lines = _fact(
        "an optimizer step", f"at least {format_seconds(roofline.seconds)}; the wall: {roofline.wall} ({walls})"
    )
    rate = f"{plan.tokens_per_second:,.0f} tokens/s/chip at that bound"
    if plan.token_share is not None:
        rate += f", {plan.token_share * plan.tokens_per_second:,.0f} without padding"
    if plan.mfu is not None:
        rate += f"; MFU {100 * plan.mfu:.0f} %"
    lines += _fact("", rate)
    lines += _fact("expect", f"{format_seconds(fast)} to {format_seconds(slow)} ({BASIS})")
    if (ratio := plan.flops_ratio) is not None:
        text = f"{ratio:.2f} of the analytic figure"
        if ratio > FLOPS_RATIO:
            text += ". WARNING: above 1.1, the compiler computes something twice that it was not asked to"
        lines += _fact("compiled arithmetic", text)
    return lines


def _run(plan: Plan) -> list[str]:
    if plan.run_seconds is None:
        return []
    least, fast, slow = map(format_seconds, plan.run_seconds)
    micro = plan.gradient_accumulation_steps
    what = f"{plan.optimizer_steps:,} optimizer steps of {micro} micro-step{'s' if micro > 1 else ''}"
    lines = _fact("the run", f"{what}: at least {least}, expect {fast} to {slow}, compiling and evaluation aside")
    if plan.run_dollars is not None:
        least, fast, slow = (f"${dollars:,.2f}" for dollars in plan.run_dollars)
        price = plan.price
        lines += _fact("its cost", f"at least {least}, expect {fast} to {slow}")
        lines += _fact(
            "", f"at ${price.dollars_per_chip_hour:.2f} a chip and hour, {price.region}, {price.date} ({price.source})"
        )
    return lines


def _trials(plan: Plan) -> list[str]:
    if not plan.trials:
        return []
    names = list(dict.fromkeys(name for trial in plan.trials for name in trial.settings))
    heads = [*names, "memory", "fits", "step at least", "tokens/s/chip"]
    rows = [
        [
            *(trial.settings.get(name, "") for name in names),
            "?" if trial.peak_bytes is None else format_bytes(trial.peak_bytes),
            {True: "yes", False: "no", None: "?"}[trial.fits],
            "?" if trial.seconds is None else format_seconds(trial.seconds),
            "?" if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
        ]
        for trial in plan.trials
    ]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heads, *rows]
    ]
    return ["variants, of those tried, that no other beats in both speed and memory", *table]


def _made_by(plan: Plan) -> dict[str, str]:
    compiled = f"{len(plan.compiled)} of {len(plan.programs)} programs" if plan.programs else "no programs"
    seconds = format_seconds(sum(program.seconds for program in plan.programs))
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    return {"compiled": f"{compiled}, {seconds}; {versions}"} if plan.programs else {"versions": versions}
