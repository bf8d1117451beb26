"""
What watching a run costs: `TPUSFTTrainer` with recompile monitor, step status and record, as by default, and without.

    python tests/benchmarks/watch_cost.py

Trains the tiny model of `step_overhead.py` in the same way, with replayed steps: two processes take turns, a window of steps
each, and every ratio is that of two windows of the same round, so that a change of the machine's load falls on both. Two
processes that do the same also differ by some percent, for as long as they live, so that there are several such pairs. CPU time
is that of all threads of the process; host time that of the threads that run Python. The report, which is made once, after
training, is not part of it. The command fails if the losses differ at all.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from step_overhead import describe_setup, make_plan, measure, ratio
from tables import make_parser, publish


DOCUMENT = Path(__file__).parents[2] / "docs" / "run_report.md"
# What is measured in a window, and how it is shown.
_MEASURED = {
    "steps_per_second": ("steps per second", 1, ".2f"),
    "cpu_seconds_per_step": ("CPU time of a step (ms)", 1000, ".2f"),
    "host_seconds_per_step": ("host time of a step (ms)", 1000, ".2f"),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default: 28)")
    parser.add_argument("--repeats", type=int, default=8, help="rounds of a pair (default: 8)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of processes (default: 12)")
    parser.add_argument("--window", type=int, default=50, help="steps of a window (default: 50)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, 2 pairs of 2 short windows: for the losses, not the times"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers, arguments.repeats, arguments.window, arguments.pairs = 2, 2, 6, 2
    return arguments


def make_table(pairs: list[dict[str, dict[str, Any]]]) -> str:
    """Show the results."""
    lines = [
        "| | watched | not watched | watched / not watched | middle half of the pairs |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (title, scale, form) in _MEASURED.items():
        on, off = (scale * statistics.median(pair[which][name] for pair in pairs) for which in ("ours", "unwatched"))
        low, middle, high = statistics.quantiles((ratio(pair, "ours", "unwatched", name) for pair in pairs), n=4)
        lines.append(f"| {title} | {on:{form}} | {off:{form}} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its table."""
    arguments = parse_arguments()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_TPU_EXT": "0", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        plan = replace(make_plan(arguments, Path(directory)), window=arguments.window)
        if not arguments.quick:
            # TRL's default.
            plan = replace(plan, logging_steps=10)
        # Who starts first and who second does not matter by itself; nobody shall always be the same.
        orders = [("ours", "unwatched")[:: -1 if number % 2 else 1] for number in range(arguments.pairs)]
        pairs = [measure(plan, order) for order in orders]
    if any(pair["ours"]["losses"] != pair["unwatched"]["losses"] for pair in pairs):
        raise SystemExit("The losses differ.")
    setup = describe_setup(arguments, plan, pairs[0])
    setup["times"] += f", and over {arguments.pairs} pairs of processes"
    setup["command"] = "`python tests/benchmarks/watch_cost.py " + (
        "--quick`"
        if arguments.quick
        else f"--layers {arguments.layers} --repeats {arguments.repeats} --window {arguments.window} --pairs {arguments.pairs}`"
    )
    block = "\n".join([make_table(pairs), "", *(f"- {name}: {line}" for name, line in setup.items())])
    publish(arguments, DOCUMENT, "watch_cost", block, {**setup, "results": pairs})


if __name__ == "__main__":
    main()
