"""`hf-tpu doctor`: environment checks and a smoke training run."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from .. import __version__
from .json_output import json_output


DESCRIPTION = """\
Check this machine: packages and their versions, the accelerator and the process that uses it, and the compilation cache.
Then train a tiny model for some seconds, in a process of its own, and compare it with eager PyTorch. With --full, train with
every mechanism of a run instead, each beside eager PyTorch: at most ten minutes. Nothing is downloaded. As for every
run on a TPU, transparent hugepages are switched on where this process may.

  ✓ as it should be    ✗ failed, with what to do    – nothing to look at

The exit status is 0 if everything passed and 1 if something failed.
"""
_NAMES = 24
_MARKS = {"ok": "✓", "failed": "✗", "none": "–"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the `doctor` subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, with a smoke training run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no_smoke", action="store_true", help="skip the smoke training run")
    parser.add_argument(
        "--full", action="store_true", help="try every mechanism of training, each against eager CPU, in its place"
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long --full may take (default: 10)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to FILE; -: print them alone"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Examine this machine, and return the exit status: `0` if everything passed, `1` if something failed."""
    with json_output(args.json) as write_json:
        checks, output = _examine(args)
        failed = any(check.status == "failed" for check in checks)
        results = {
            "hf_tpu_ext": __version__,
            "ok": not failed,
            "checks": [vars(check) for check in checks],
            "output_of_the_training": output,
        }
        write_json(json.dumps(results, indent=2))
    return int(failed)


def _examine(args: argparse.Namespace) -> tuple[list, str]:
    """Examine this machine, and print what is found. Returns the checks, and the output of the training run."""
    from ..doctor.machine import examine_machine
    from ..doctor.trials import FULL, QUICK, Trials

    checks = []

    def show(results: Iterable) -> None:
        for check in results:
            checks.append(check)
            print(f"{_MARKS[check.status]} {check.name:<{_NAMES}} {check.text}", flush=True)
            if check.fix is not None:
                print(f"{'':<{_NAMES + 2}} fix: {check.fix}", flush=True)

    print(f"hf_tpu_ext {__version__}")
    show(examine_machine())
    trials = None
    if args.full:
        trials = Trials(FULL, args.minutes)
        print(f"mechanisms, each against eager CPU, in at most {args.minutes:g} minutes:", flush=True)
    elif not args.no_smoke:
        trials = Trials(QUICK)
        print("smoke training run:", flush=True)
    if trials is not None:
        show(trials.run())
    failures = [check.name for check in checks if check.status == "failed"]
    print(f"{len(failures)} failed: {', '.join(failures)}" if failures else "everything passed")
    return checks, trials.output if trials else ""
