"""Puts the tables of the benchmarks into documents."""

import os
from pathlib import Path


def write_block(document: Path, name: str, block: str) -> None:
    """
    Replace what stands between two markers of a document.

    Args:
        document (`Path`):
            Markdown file.
        name (`str`):
            Name in the markers.
        block (`str`):
            Markdown.

    Raises:
        `ValueError`: The markers are not there.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, found_start, rest = document.read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"{document.name} has no place for the table. Put these two lines into it: {start} and {end}")
    temporary = document.with_suffix(".tmp")
    temporary.write_text(f"{before}{start}\n{block}\n{end}{after}", encoding="utf-8")
    os.replace(temporary, document)
