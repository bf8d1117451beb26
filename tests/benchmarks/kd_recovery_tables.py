"""Tables of [`kd_recovery`]."""

import argparse
import math
import statistics
from collections.abc import Callable


#: For each model and seed, by kind of text, the `loss` and the `kl`.
Results = dict[str, list[dict[str, dict[str, float]]]]


def mean_of(result: dict[str, dict[str, float]], kinds: list[str], measure: str) -> float:
    """Mean of a measure over kinds of text, of which there is equally much."""
    return statistics.mean(result[kind][measure] for kind in kinds)


def recovered(results: Results, name: str, kinds: list[str], of: Callable[[float], float] = float) -> list[float]:
    """Share of what was lost that a method brought back."""
    teacher, damaged = (of(mean_of(results[model][0], kinds, "loss")) for model in ("teacher", "student"))
    return [(damaged - of(mean_of(result, kinds, "loss"))) / (damaged - teacher) for result in results[name]]


def show(values: list[float], form: str, spread_form: str | None = None) -> str:
    """Write down the values of several seeds."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), spread_form or form)}"


def make_tables(results: Results, groups: dict[str, list[str]]) -> str:
    """Show the results."""
    titles = {name: "rounded student, before training" if name == "student" else name for name in results}
    head = [f"{group}: perplexity | recovered of it | of its logarithm | KL to the teacher" for group in groups]
    lines = [f"| | {' | '.join(head)} |", "|---|" + "---:|" * (4 * len(groups))]
    for name, by_seed in results.items():
        cells = []
        for kinds in groups.values():
            cells.append(show([math.exp(mean_of(result, kinds, "loss")) for result in by_seed], ".4g", ".2g"))
            cells.append(show(recovered(results, name, kinds, math.exp), ".1%"))
            cells.append(show(recovered(results, name, kinds), ".1%"))
            cells.append(show([mean_of(result, kinds, "kl") for result in by_seed], ".3f"))
        lines.append(f"| {titles[name]} | {' | '.join(cells)} |")
    for group, kinds in groups.items():
        if len(kinds) > 1:
            lines += [
                "",
                f"| {group}, recovered of the logarithm | {' | '.join(kinds)} |",
                "|---|" + "---:|" * len(kinds),
            ]
            for name in results:
                cells = (show(recovered(results, name, [kind]), ".1%") for kind in kinds)
                lines.append(f"| {titles[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cached_against_online(results: Results, kinds: list[str]) -> str:
    """Compare the two teachers with what changes from seed to seed."""
    cached, online = (
        [mean_of(result, kinds, "loss") for result in results[f"{teacher} teacher"]]
        for teacher in ("cached", "online")
    )
    apart = max(abs(own - other) for own, other in zip(cached, online, strict=True))
    return (
        f"- cached and online teacher are at most {apart:.1g} nats per token apart in a seed; the standard deviation over the "
        f"seeds is {statistics.stdev(online):.1g}"
    )


def describe(arguments: argparse.Namespace, tokens: dict[str, int]) -> str:
    """Say what was run."""
    model = "a tiny model that has learned additions" if arguments.tiny else "SmolLM2-135M-Instruct"
    text = (
        "worked additions; other ones are held out"
        if arguments.tiny
        else "proceedings of a conference (the first three quarters; the last is held out). The texts are those of the "
        "Canterbury corpus, code is functions of Python's standard library"
    )
    seeds = "1 seed" if arguments.seeds == 1 else f"{arguments.seeds} seeds (mean ± standard deviation)"
    return "\n".join(
        [
            f"- teacher: {model}; student: its linear layers rounded to {arguments.bits} bits in groups of "
            f"{arguments.group_size}",
            f"- trained on: {text}",
            f"- training: LoRA, r=8 on all linear layers, {arguments.steps} steps of {arguments.batch_size} x "
            f"{arguments.max_length} tokens, learning rate {arguments.learning_rate:g}, float32, "
            f"`backend={arguments.backend}` on CPU, {seeds}",
            f"- with a teacher: `kd_alpha={arguments.kd_alpha:g}`, `kd_temperature={arguments.kd_temperature:g}`; the cache "
            "holds 128 tokens of each position, the online teacher gives all",
            "- measured: "
            + ", ".join(f"{count:,} tokens of {kind}" for kind, count in tokens.items())
            + "; recovered: share of what rounding took, of the perplexity and of its logarithm (nats per token)",
            f"- command: `python tests/benchmarks/kd_recovery.py{' --tiny' if arguments.tiny else ''}`",
        ]
    )
