"""
How long a run takes to its first optimizer step: stock TRL on torch_xla, and this package with layers one by one and as a loop,
by depth.

    python tests/benchmarks/first_step.py

Trains the tiny model of `step_overhead.py`, each run in a process of its own, from the start of the process to the end of the
first step. This package's runs keep their programs on disk, and a second process does the same again: on a device that can load
programs it is timed, too. XLA on the host finds the programs by their keys, cannot load them, and compiles them anew, so there
only what was found is said. The command fails if the second process does not find a program.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch_xla.core.xla_model as xm
from contenders import count, train_with
from meter import Plan
from step_overhead import make_plan
from tables import make_parser, publish, versions
from trl import SFTTrainer

from hf_tpu_ext.examples.tiny import SIZES


DOCUMENT = Path(__file__).parents[2] / "docs" / "compile_time.md"
# Stock TRL fails on torch_xla with activation checkpointing, which the loop needs, so the layers one by one are run both ways.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("`trl.SFTTrainer`", {}),
    "layers": ("`TPUSFTTrainer`", {}),
    "checkpointed": (
        '`TPUSFTTrainer`, checkpointed, `scan_layers="off"`',
        {"rematerialization": "full", "scan_layers": "off"},
    ),
    "scan": ('`TPUSFTTrainer`, checkpointed, `scan_layers="on"`', {"rematerialization": "full", "scan_layers": "on"}),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 28], help="layers (default: 4 8 16 28)")
    parser.add_argument("--quick", action="store_true", help="2 layers: for the counts, not the times")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=json.loads, help=argparse.SUPPRESS)
    parser.set_defaults(repeats=0)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.depths = [2]
    return arguments


class FirstStep:
    """Takes the place of a [`Meter`] and notes when the first step begins and ends, and what was compiled until then."""

    def step_begins(self, step: int) -> None:
        """Note that a step begins."""
        xm.wait_device_ops()
        if step == 0:
            self._cpu_seconds_at_start = time.process_time()
        if step == 1:
            cpu_seconds = time.process_time()
            self.measured = {
                "ended": time.monotonic(),
                "cpu_seconds": cpu_seconds,
                "cpu_seconds_of_step": cpu_seconds - self._cpu_seconds_at_start,
                "programs": count()["compiles"],
            }


def train(run: str, plan: Plan) -> dict[str, Any]:
    """Train in this process."""
    first_step = FirstStep()
    if run == "stock":
        train_with(SFTTrainer, plan, first_step, pad_to_multiple_of=plan.max_length)
        return first_step.measured

    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
    from hf_tpu_ext.backends import select_backend

    cache = plan.directory / f"programs of {run}"
    train_with(TPUSFTTrainer, plan, first_step, TPUSFTConfig, compile_cache_dir=str(cache), **RUNS[run][1])
    backend = select_backend()
    use = backend.cache_use()
    cache_use = {"loaded": use.hits, "found": use.hits + use.unreadable, "missed": use.misses}
    return {**first_step.measured, "device": backend.device_name, "cache": cache_use}


def measure(run: str, plan: Plan) -> dict[str, Any]:
    """Train in a process of its own."""
    command = [sys.executable, __file__, "--run", run, "--plan", json.dumps(vars(plan), default=str)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run} failed:\n{done.stdout}{done.stderr}")
    measured = json.loads(done.stdout.splitlines()[-1])
    # The clock is the machine's, and the same in every process.
    return {"seconds": measured.pop("ended") - started, **measured}


def make_row(layers: int, run: str, cold: dict[str, Any], again: dict[str, Any] | None) -> str:
    """Show a run."""
    found = ""
    if again is not None:
        cache = again["cache"]
        if cache["missed"]:
            raise SystemExit(
                f"A second process of {RUNS[run][0]} at {layers} layers misses {cache['missed']} programs."
            )
        found = f"all {cache['found']}"
        if cache["loaded"]:
            found += f", first step after {again['seconds']:.1f} s"
    return (
        f"| {layers} | {RUNS[run][0]} | {cold['programs']} | {cold['seconds']:.1f} | {cold['cpu_seconds']:.1f} "
        f"| {cold['cpu_seconds_of_step']:.1f} | {found} |"
    )


def main() -> None:
    """Run the benchmark and print its table."""
    arguments = parse_arguments()
    # HF_TPU_EXT=1 would put this package's trainer in the place of stock TRL's.
    os.environ |= {"HF_TPU_EXT": "0", "HF_HUB_OFFLINE": "1"}
    if arguments.run:
        arguments.plan["directory"] = Path(arguments.plan["directory"])
        print(json.dumps(train(arguments.run, Plan(**arguments.plan))))
        return
    table = [
        "| layers | | programs to the first step | seconds | CPU seconds | of them in the step | of the run's programs, a "
        "second process finds |",
        "|---:|---|" + "---:|" * 4 + "---|",
    ]
    results = []
    for layers in arguments.depths:
        arguments.layers = layers
        with tempfile.TemporaryDirectory() as directory:
            plan = replace(make_plan(arguments, Path(directory)), logging_steps=1)
            for run in RUNS:
                cold = measure(run, plan)
                again = measure(run, plan) if "cache" in cold else None
                table.append(make_row(layers, run, cold, again))
                print(table[-1], file=sys.stderr)
                results.append({"layers": layers, "run": run, "cold": cold, "again": again})
    depths = " ".join(map(str, arguments.depths))
    setup = {
        "model": f"Qwen3, hidden size {SIZES['hidden_size']}, float32; batch of {plan.batch_size} x {plan.max_length} tokens",
        "versions": versions(),
        "machine": f"{cold['device']}, {os.cpu_count()} cores",
        "command": "`python tests/benchmarks/first_step.py "
        + ("--quick`" if arguments.quick else f"--depths {depths}`"),
    }
    block = "\n".join([*table, "", *(f"- {name}: {line}" for name, line in setup.items())])
    publish(arguments, DOCUMENT, "first_step", block, {**setup, "measured": results})


if __name__ == "__main__":
    main()
