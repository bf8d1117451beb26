"""Activation checkpointing that a model asks for by itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint
import torch_xla.utils.checkpoint
from transformers.utils import logging

from ...temporarily import temporarily


logger = logging.get_logger(__name__)


@contextmanager
def replace_checkpoint(recompute: Callable) -> Iterator[None]:
    """
    Within this context, `checkpoint` of PyTorch and of torch_xla is `recompute(function, *args)`.

    PyTorch's fails on XLA. torch_xla's restores the state of a generator that this package does not draw from, so what is computed again
    would have other random numbers. Models import `checkpoint` by its name: what it looks up when it is called is replaced.
    """
    own = SimpleNamespace(apply=lambda function, preserve_rng_state, *args: recompute(function, *args))
    of_torch = {"CheckpointFunction": own, "_checkpoint_without_reentrant_generator": _keep_all}
    with (
        temporarily(torch.utils.checkpoint, **of_torch),
        temporarily(torch_xla.utils.checkpoint, CheckpointFunction=own),
    ):
        yield


def _keep_all(*args: Any, **kwargs: Any) -> Iterator[None]:
    """What PyTorch runs before and after the function, which it calls by itself."""
    logger.warning_once(
        "Your model calls torch.utils.checkpoint.checkpoint without `use_reentrant`, which keeps all activations on XLA. With it, they "
        "are computed again."
    )
    yield
