"""Ends each program of a step, and says when one is compiled."""

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.program import Program


logger = logging.get_logger(__name__)


class ProgramWatch:
    """
    Ends programs, and tells a person when one is compiled and when one is compiled again.

    Args:
        backend ([`Backend`]):
            The backend in use.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to leave out the progress of a compilation.
    """

    def __init__(self, backend: Backend, quiet: bool = False):
        self._backend = backend
        self._quiet = quiet
        self._seen: dict[Hashable, int] = {}
        self.recompiles = 0

    @property
    def programs(self) -> list[Hashable]:
        """The programs seen so far."""
        return list(self._seen)

    def end(
        self, kind: str, shape: tuple[int, ...], where: str, run: Callable[[], Program | None] | None = None
    ) -> Program | None:
        """
        End the program recorded so far.

        Args:
            kind (`str`):
                What it does, e.g. `"training step"`.
            shape (`tuple[int, ...]`):
                Shape of its batch.
            where (`str`):
                Place in the run, e.g. `"step 12"`.
            run (`Callable[[], Program | None]`, *optional*):
                Compiles and starts it, by default [`Backend.end_step`].

        Returns:
            [`Program`] or `None`: What `run` returned.
        """
        run = self._backend.end_step if run is None else run
        key = (kind, shape)
        start = time.monotonic()
        compiles = self._backend.compiles()
        if key in self._seen:
            program = run()
        else:
            with self._compiling(f"{kind} {' x '.join(map(str, shape))}"):
                program = run()
        seconds = time.monotonic() - start
        if key in self._seen and self._backend.compiles() > compiles:
            self.recompiles += 1
            logger.warning(
                f"{where}: the {kind} for batches of {' x '.join(map(str, shape))} was compiled again "
                f"({seconds:.1f} s). Something that the program depends on has changed."
            )
        self._seen[key] = self._seen.get(key, 0) + 1
        self._backend.note_programs()
        return program

    @contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        if self._quiet:
            yield
            return
        done = threading.Event()
        start, compiles = time.monotonic(), self._backend.compiles()
        bar = tqdm(total=0, bar_format="{desc}", leave=False, desc=f"compiling the {what}", file=sys.stderr)

        def tick() -> None:
            while not done.wait(1.0):
                bar.set_description_str(f"compiling the {what}: {time.monotonic() - start:.0f} s")

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
            bar.close()
            verb = "compiled" if self._backend.compiles() > compiles else "found"
            tqdm.write(f"{verb} the {what} in {time.monotonic() - start:.1f} s", file=sys.stderr)
