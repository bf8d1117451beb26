"""`--json FILE` of a command, and `--json -`, which prints."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ..atomic_write import write_atomically


@contextmanager
def json_output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """
    Within this context, what a command prints goes to stderr if `path` is `-`, so that stdout has the JSON alone. Yields what writes
    the JSON to where the option says, if anywhere.
    """
    if path != Path("-"):
        yield lambda text: write_atomically(path, text) if path is not None else None
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        yield lambda text: print(text, file=stdout)
