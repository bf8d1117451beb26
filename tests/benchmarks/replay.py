"""
What replayed steps save: host time and speed of `TPUSFTTrainer` with and without `step_replay`, by depth, full and LoRA, beside
the host time of a loop written in JAX.

    python tests/benchmarks/replay.py

Trains the tiny model of `step_overhead.py` in the same way: each run in a process of its own, in turns, ratios within a
round. Host time is the CPU time of the threads that run Python: the training loop's, and autograd's, which traces the
backward pass. The command fails if the losses differ at all.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meter import Plan
from step_overhead import describe_setup, make_plan, measure, ratio
from tables import make_parser, publish


DOCUMENT = Path(__file__).parents[2] / "docs" / "recompilation.md"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 28], help="layers (default: 4 8 16 28)")
    parser.add_argument("--repeats", type=int, default=7, help="timed windows of each run (default: 7)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, one short window: for the losses, not the times"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.depths, arguments.repeats = [2], 1
    return arguments


def make_row(layers: int, plan: Plan, results: dict[str, dict[str, Any]]) -> str:
    """Show one comparison."""
    traced, replayed = results["traced"], results["ours"]
    if traced["losses"] != replayed["losses"]:
        raise SystemExit(f"Replayed steps have other losses: {replayed['losses']}, traced {traced['losses']}.")
    host = [1000 * result["host_seconds_per_step"] for result in (traced, replayed, results["stacked"])]
    # JAX's loop has no LoRA.
    host.append(1000 * results["jax"]["host_seconds_per_step"] if "jax" in results else None)
    cells = ["" if milliseconds is None else f"{milliseconds:.1f}" for milliseconds in host]
    for name in ("ours", "stacked"):
        cells.append(f"{ratio(results, name, 'traced'):.2f}")
    return f"| {layers} | {'LoRA' if plan.lora else 'full'} | {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print its table."""
    arguments = parse_arguments()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_TPU_EXT": "0", "HF_HUB_OFFLINE": "1"}
    table = [
        "| layers | | host time of a traced step (ms) | of a replayed step (ms) | with stacked layers (ms) | of a bare JAX loop (ms) | "
        "speed, times traced | with stacked layers |",
        "|---:|---|" + "---:|" * 6,
    ]
    measured = []
    for layers in arguments.depths:
        for lora in (False, True):
            arguments.layers = layers
            with tempfile.TemporaryDirectory() as directory:
                plan = make_plan(arguments, Path(directory), lora)
                results = measure(plan, ["traced", "ours", "stacked", *([] if lora else ["jax"])])
            table.append(make_row(layers, plan, results))
            measured.append({"layers": layers, "lora": lora, "results": results})
    setup = describe_setup(arguments, plan, results)
    depths = " ".join(map(str, arguments.depths))
    setup |= {
        "model": setup["model"].replace(f", {layers} layers", ""),
        "command": "`python tests/benchmarks/replay.py "
        + ("--quick`" if arguments.quick else f"--depths {depths} --repeats {arguments.repeats}`"),
    }
    block = "\n".join([*table, "", *(f"- {name}: {line}" for name, line in setup.items())])
    publish(arguments, DOCUMENT, "replay", block, {**setup, "measured": measured})


if __name__ == "__main__":
    main()
