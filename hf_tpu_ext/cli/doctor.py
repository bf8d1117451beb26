"""`hf-tpu doctor`: environment checks and a smoke training run."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .. import __version__
from ..errors import UserError
from .json_output import json_output


DESCRIPTION = """\
Check this machine: packages and their versions, the accelerator and the process that uses it, and the compilation cache.
Then train a tiny model for some seconds, in a process of its own, and compare it with eager PyTorch. With --full, train with
every mechanism of a run instead, each beside eager PyTorch: at most ten minutes. Nothing is changed, and nothing is
downloaded.

  ✓ as it should be    ✗ failed, with what to do    – nothing to look at

The exit status is 0 if everything passed and 1 if something failed.
"""
_NAMES = 24
_MARKS = {"ok": "✓", "failed": "✗", "none": "–"}
_PLAIN_MARKS = {"ok": "ok", "failed": "FAILED", "none": "-"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the `doctor` subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, with a smoke training run",
        description=_printable(DESCRIPTION),
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
    if args.json is not None and args.json.is_dir():
        raise UserError(f"--json {args.json} is a directory. Give a file, for example --json doctor.json")
    with json_output(args.json) as write_json:
        checks, output = _examine(args)
        write_json(_to_json(checks, output))
    return int(any(check.status == "failed" for check in checks))


def _examine(args: argparse.Namespace) -> tuple[list, str]:
    """Examine this machine, and print what is found. Returns the checks, and the output of the training run."""
    from ..doctor.full import FullTest
    from ..doctor.machine import examine_machine
    from ..doctor.smoke import SmokeTest

    checks = []

    def show(results: Iterable) -> None:
        for check in results:
            checks.append(check)
            print(_describe(check), flush=True)

    print(f"hf_tpu_ext {__version__}")
    show(examine_machine())
    test = None
    if args.full:
        test = FullTest(args.minutes)
        print(f"mechanisms, each against eager CPU, in at most {args.minutes:g} minutes:", flush=True)
        show(test.run())
    elif not args.no_smoke:
        test = SmokeTest()
        print("smoke training run:", flush=True)
        show(test.run())
    failures = [check.name for check in checks if check.status == "failed"]
    print(f"{len(failures)} failed: {', '.join(failures)}" if failures else "everything passed")
    return checks, test.output if test else ""


def _printable(text: str) -> str:
    """Text with a question mark for each character that the screen does not have."""
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def _describe(check) -> str:
    signs = "".join(_MARKS.values())
    marks = _MARKS if _printable(signs) == signs else _PLAIN_MARKS
    width = max(map(len, marks.values()))
    text = f"{marks[check.status]:<{width}} {check.name:<{_NAMES}} {check.text}"
    if check.fix is not None:
        text += f"\n{'':<{width}} {'':<{_NAMES}} fix: {check.fix}"
    # Paths and messages of others have characters of their own.
    return _printable(text)


def _to_json(checks: list, output: str) -> str:
    return json.dumps(
        {
            "hf_tpu_ext": __version__,
            "ok": all(check.status != "failed" for check in checks),
            "checks": [vars(check) for check in checks],
            "output_of_the_training": output,
        },
        indent=2,
    )
