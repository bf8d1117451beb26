"""What the benchmarks share: their options, and where their tables go."""

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_tpu_ext.atomic_write import write_atomically


def make_parser(description: str, document: Path) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's command line, with the options that [`publish`] takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all measurements to FILE")
    parser.add_argument(
        "--write-docs", dest="write", action="store_true", help=f"replace the table in {document.name}"
    )
    return parser


def publish(arguments: argparse.Namespace, document: Path, name: str, block: str, measured: Any) -> None:
    """Print a benchmark's table, and write what the command line asks for."""
    print(block)
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2), encoding="utf-8")
    if arguments.write:
        write_block(document, name, block)


def versions() -> str:
    """The versions that figures depend on."""
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "torch_xla", "transformers", "trl"))


def read_block(document: Path, name: str) -> str:
    """What stands between two markers of a document."""
    _, _, rest = document.read_text(encoding="utf-8").partition(f"<!-- {name}:start -->\n")
    return rest.partition(f"\n<!-- {name}:end -->")[0]


def write_block(document: Path, name: str, block: str) -> None:
    """Replace what stands between two markers of a document."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found_start, rest = document.read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"{document.name} has no place for the table. Put these two lines into it: {start} and {end}")
    write_atomically(document, f"{before}{start}\n{block}\n{end}{after}")
