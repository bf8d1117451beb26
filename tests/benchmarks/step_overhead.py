"""
What a training step costs beside its arithmetic: stock TRL on torch_xla, this package, and bare hand-written loops in
torch_xla and in JAX.

    python tests/benchmarks/step_overhead.py

All train the same tiny model (narrow and deep, so that the host is the bottleneck) on the same rows in the same order, in
float32 on XLA compiled for the host. Each has a process of its own, and the processes take turns: one window of steps each,
round after round. Ratios are taken within a round, so that a change of the machine's load falls on both sides. The command
fails if losses differ from those of the padded stock trainer by more than 1e-4 in 100 steps. JAX and Optax have an environment
of their own; where it is not there, they are left out.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import CONTENDERS
from meter import Plan
from tables import make_parser, publish
from transformers import AutoTokenizer

from hf_tpu_ext.data.buckets import round_up_length
from hf_tpu_ext.examples.tiny import SIZES, make_arithmetic, make_model


LOSS_TOLERANCE = 1e-4
# Over hundreds of steps, differences of rounding grow in any two programs.
LOSS_STEPS = 100
DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default: 28)")
    parser.add_argument("--repeats", type=int, default=21, help="timed windows of each contender (default: 21)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, one short window: for the counts, not the times"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.layers, arguments.repeats = 2, 1
    return arguments


def make_plan(arguments: argparse.Namespace, directory: Path, lora: bool = False) -> Plan:
    """Make the model and the rows that all contenders train."""
    tokenizer = AutoTokenizer.from_pretrained(make_model(directory / "model", num_hidden_layers=arguments.layers))
    lines = (make_arithmetic(directory / "data") / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [row["prompt"][0]["content"] + row["completion"][0]["content"] for row in map(json.loads, lines)]
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    (directory / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    longest = max(len(row["input_ids"]) for row in rows)
    return Plan(
        directory,
        max_length=round_up_length(longest, longest + 8),
        batch_size=1,
        logging_steps=3 if arguments.quick else 5,
        window=3 if arguments.quick else 10,
        repeats=arguments.repeats,
        lora=lora,
    )


class Runner:
    """
    One contender in a process of its own.

    Args:
        name (`str`):
            One of [`CONTENDERS`].
        plan ([`Plan`]):
            What to train and to measure.
    """

    def __init__(self, name: str, plan: Plan):
        contender = CONTENDERS[name]
        self.plan = contender.adapt(plan)
        self.windows: list[dict[str, float]] = []
        self._name = name
        self._log = plan.directory / f"{name}.log"
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, self._log.open("wb") as log:
            # Its end of the connection closes when this process does, and so does the process that waits at it.
            subprocess.Popen(
                [sys.executable, contender.script, str(theirs.fileno()), name],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
            )
        self._connection.send(self.plan)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message."""
        try:
            return self._connection.recv()
        except EOFError:
            log = self._log.read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{self._name} failed:\n{log}") from None

    def run_window(self) -> None:
        """Let the process run its next timed window."""
        self._connection.send("go")
        self.windows.append(self.receive())


def measure(plan: Plan, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run contenders."""
    runners, results = {}, {}
    for name in names:
        print(f"{name}: compiling and counting", file=sys.stderr)
        runners[name] = Runner(name, plan)
        results[name] = {"per_step": runners[name].receive()}
    for repeat in range(plan.repeats):
        # Every other round the other way round: who comes second finds a warmer machine.
        for name, runner in list(runners.items())[:: -1 if repeat % 2 else 1]:
            if repeat < runner.plan.repeats:
                print(f"{name}: window {repeat + 1} of {runner.plan.repeats}", file=sys.stderr)
                runner.run_window()
    for name, runner in runners.items():
        results[name] |= {"steps": runner.plan.total_steps, "windows": runner.windows, **runner.receive()}
    for result in results.values():
        for measured in ("steps_per_second", "cpu_seconds_per_step", "host_seconds_per_step"):
            result[measured] = statistics.median(window[measured] for window in result["windows"])
    return results


def ratio(results: dict[str, dict[str, Any]], mine: str, other: str, measured: str = "steps_per_second") -> float:
    """Compare two contenders round by round."""
    rounds = zip(results[mine]["windows"], results[other]["windows"], strict=False)
    return statistics.median(window[measured] / theirs[measured] for window, theirs in rounds)


def describe_processor() -> str:
    """The processor of this machine and how many cores it has."""
    name = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    return f"{name}, {os.cpu_count()} cores"


def check_losses(results: dict[str, dict[str, Any]], stock: str) -> None:
    """Exit where losses of the first steps differ from those of a stock trainer, one of [`CONTENDERS`]."""
    expected = results[stock]["losses"]
    for name, result in results.items():
        worst = max(abs(loss - expected[step]) for step, loss in result["losses"].items() if step <= LOSS_STEPS)
        if not worst <= LOSS_TOLERANCE:
            raise SystemExit(
                f"The losses of {CONTENDERS[name].title} and of {CONTENDERS[stock].title} differ by {worst:.2e} (at most "
                f"{LOSS_TOLERANCE})."
            )


def describe_setup(arguments: argparse.Namespace, plan: Plan, results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Say what was run, with what, and on what."""
    return {
        "model": f"Qwen3, {arguments.layers} layers, hidden size {SIZES['hidden_size']}, float32; batch of "
        f"{plan.batch_size} x {plan.max_length} tokens",
        "times": f"median over {plan.repeats} windows of {plan.window} steps, with a log every {plan.logging_steps} steps",
        "versions": "; ".join(dict.fromkeys(result["versions"] for result in results.values())),
        "machine": f"XLA on CPU: {describe_processor()}",
        "command": "`python tests/benchmarks/step_overhead.py "
        + ("--quick`" if arguments.quick else f"--layers {arguments.layers} --repeats {arguments.repeats}`"),
    }


def make_table(results: dict[str, dict[str, Any]], loss_step: int) -> str:
    """Show the results."""
    lines = [
        "| | programs compiled | executions per step | reads per step | steps per second | of the bare loop | "
        f"of padded stock | CPU seconds per step | of them in Python | loss at step {loss_step} |",
        "|---|" + "---:|" * 9,
    ]
    for name, result in results.items():
        lines.append(
            f"| {CONTENDERS[name].title} | {result['programs']} in {result['steps']} steps "
            f"| {result['per_step']['executions']:.1f} | {result['per_step']['reads']:.1f} "
            f"| {result['steps_per_second']:.2f} | {ratio(results, name, 'bare'):.2f} "
            f"| {ratio(results, name, 'stock_padded'):.2f} | {result['cpu_seconds_per_step']:.3f} "
            f"| {result['host_seconds_per_step']:.3f} "
            f"| {result['losses'][loss_step]:.5f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its table."""
    arguments = parse_arguments()
    # HF_TPU_EXT=1 would put this package's trainer in the place of stock TRL's.
    os.environ |= {"PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "HF_TPU_EXT": "0", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        plan = make_plan(arguments, Path(directory))
        # What watching costs is a table of its own: watch_cost.py.
        results = measure(plan, [name for name in CONTENDERS if name != "unwatched"])
    setup = describe_setup(arguments, plan, results)
    loss_step = max(set.intersection(*(set(result["losses"]) for result in results.values())))
    block = "\n".join([make_table(results, loss_step), "", *(f"- {name}: {line}" for name, line in setup.items())])
    publish(arguments, DOCUMENT, "benchmark", block, {**setup, "results": results})
    check_losses(results, "stock_padded")


if __name__ == "__main__":
    main()
