"""`--json FILE` of a command, and `--json -`, which prints."""

import errno
import os
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
    the JSON to where the option says, if anywhere: to a file at once, and to stdout the last at the end, also after an error. That a
    file can be written there is checked before, and a directory that is missing is made with the file.
    """
    if path != Path("-"):
        if path is not None:
            reason = os.strerror(errno.EISDIR) if os.path.isdir(path) else why_not_made(path.parent)
            if reason is not None:
                raise UserError(
                    f"--json {path} cannot be written ({reason}). Give a file in a directory of yours, for example "
                    "--json found.json"
                )
        yield lambda text: _write(path, text) if path is not None else None
        return
    stdout, texts = sys.stdout, []
    with redirect_stdout(sys.stderr):
        try:
            yield texts.append
        finally:
            if texts:
                print(texts[-1], file=stdout)


def why_not_made(directory: Path) -> str | None:
    """Why a directory cannot be made, or be written to, by what of its path is there; `None` where it can be."""
    path = directory.absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not os.path.isdir(nearest):
        return f"{nearest}: {os.strerror(errno.ENOTDIR)}"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest}: {os.strerror(errno.EACCES)}"
    return None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
