"""`hf-tpu report`: make the report of a run again, or compare several, runs or plans."""

import argparse
from pathlib import Path


def add_parser(commands) -> None:
    """Register the `report` subcommand."""
    parser = commands.add_parser(
        "report",
        help="report on a run, or compare several runs or plans",
        description="Make report.html and report.md of a run from the record in its output directory, also while it is "
        "running or after it was killed. Of several runs, make comparison.html and comparison.md in the current directory: "
        "their curves, and what differs in their recipes and results; of several plans (`hf-tpu plan --json FILE`), plans.html and plans.md: what each "
        "expects.",
    )
    parser.add_argument(
        "run_dirs", nargs="+", metavar="RUN_DIR", help="output_dir of a run; or several files of plans"
    )
    parser.add_argument("--output_dir", type=Path, help="where to write the report; created if missing")
    parser.add_argument("--prices", type=Path, help="prices per chip-hour, instead of list prices (see `hf-tpu plan`)")
    parser.add_argument(
        "--plan",
        type=Path,
        help="plan of the run, as `hf-tpu plan --json` wrote it, to compare with the measurements (default: plan.json in "
        "RUN_DIR, if there is one)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Make a report, and return the exit status `0`."""
    from ..hardware.prices import PRICES
    from ..report.make import make_report

    page = make_report(args.run_dirs, args.output_dir, args.prices or PRICES, args.plan)
    print(f"{page}\n{page.with_suffix('.md')}")
    return 0
