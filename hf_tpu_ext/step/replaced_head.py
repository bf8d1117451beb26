"""TRL's fused language model head, and putting another in its place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import trl.trainer.utils


@contextmanager
def head_computed_by(apply: Callable[..., tuple]) -> Iterator[None]:
    """
    Within this context, TRL's fused language model head is computed by `apply`, which is called as
    `trl.kernels.ChunkedLogProbFunction.apply`. The outermost context decides.
    """
    function = trl.trainer.utils._ChunkedLogProbFunction
    if isinstance(function, SimpleNamespace):
        yield
        return
    trl.trainer.utils._ChunkedLogProbFunction = SimpleNamespace(apply=apply)
    try:
        yield
    finally:
        trl.trainer.utils._ChunkedLogProbFunction = function
