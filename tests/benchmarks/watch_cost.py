"""
What watching a run costs: `TPUSFTTrainer` with recompile monitor, step status and record, as by default, and without.

    python tests/benchmarks/watch_cost.py

Trains the tiny model of `step_overhead.py` in the same way, with replayed steps: two processes take turns, a window of steps
each, and every ratio is that of two windows of the same round, so that a change of the machine's load falls on both. CPU time
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

from step_overhead import describe_setup, make_plan, measure
from tables import make_parser, publish


DOCUMENT = Path(__file__).parents[2] / "docs" / "run_report.md"
# What is measured in a window, and how it is shown.
_MEASURED = {
    "steps_per_second": ("steps per second", 1, ".2f"),
    "cpu_seconds_per_step": ("CPU time of a step (ms)", 1000, ".2f"),
    "host_seconds_per_step": ("host time of a step (ms)", 1000, ".2f"),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parse the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; by default those of the process.

    Returns:
        `argparse.Namespace`: The arguments.
    """
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default: 28)")
    parser.add_argument("--repeats", type=int, default=21, help="rounds (default: 21)")
    parser.add_argument("--window", type=int, default=50, help="steps of a window (default: 50)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, 3 short windows: for the losses, not the times"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers, arguments.repeats, arguments.window = 2, 3, 6
    return arguments


def make_table(results: dict[str, dict[str, Any]]) -> str:
    """
    Show the results.

    Args:
        results (`dict[str, dict[str, Any]]`):
            Measurements of `"ours"` and `"unwatched"`.

    Returns:
        `str`: Markdown table.
    """
    lines = [
        "| | watched | not watched | watched / not watched | middle half of the rounds |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (title, scale, form) in _MEASURED.items():
        on, off = ([window[name] for window in results[which]["windows"]] for which in ("ours", "unwatched"))
        ratios = [mine / other for mine, other in zip(on, off, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"| {title} | {scale * statistics.median(on):{form}} | {scale * statistics.median(off):{form}} | {middle:.3f} "
            f"| {low:.3f} to {high:.3f} |"
        )
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
        results = measure(plan, ["ours", "unwatched"])
    if results["ours"]["losses"] != results["unwatched"]["losses"]:
        raise SystemExit("The losses differ.")
    setup = describe_setup(arguments, plan, results)
    setup["command"] = "`python tests/benchmarks/watch_cost.py " + (
        "--quick`"
        if arguments.quick
        else f"--layers {arguments.layers} --repeats {arguments.repeats} --window {arguments.window}`"
    )
    block = "\n".join([make_table(results), "", *(f"- {name}: {line}" for name, line in setup.items())])
    publish(arguments, DOCUMENT, "watch_cost", block, {**setup, "results": results})


if __name__ == "__main__":
    main()
