"""Imports of many modules, in less time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """
    Within this context, garbage is not collected. The thousands of modules of PyTorch and its libraries leave next to none, and
    to look for it over and over takes a sixth of the time that they are imported in.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
