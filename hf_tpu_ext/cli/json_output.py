"""`--json FILE` of a command, and `--json -`, which prints."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from ..atomic_write import write_atomically
from ..errors import UserError


@contextmanager
def json_output(path: Path | None) -> Iterator[Callable[[str], None]]:
    """
    Within this context, what a command prints goes to stderr if `path` is `-`, so that stdout has the JSON alone. Yields what writes
    the JSON to where the option says, if anywhere: to a file at once, and to stdout the last at the end, also after an error. A
    directory that is missing is made before.
    """
    if path != Path("-"):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"--json {path} cannot be written ({error.strerror}). Give a file in a directory of yours, for example "
                    "--json found.json"
                ) from error
        yield lambda text: write_atomically(path, text) if path is not None else None
        return
    stdout, texts = sys.stdout, []
    with redirect_stdout(sys.stderr):
        try:
            yield texts.append
        finally:
            if texts:
                print(texts[-1], file=stdout)
