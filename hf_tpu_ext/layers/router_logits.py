"""The logits of experts' routers, which transformers collects while a model runs, where layers are run otherwise than one by one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers.utils import output_capturing


_NAME = "router_logits"


def are_collected() -> bool:
    """Whether the model that runs collects them, as it does for the load-balancing loss."""
    return _NAME in (output_capturing._active_collector.get() or ())


@contextmanager
def collect_apart() -> Iterator[list[Tensor]]:
    """Within this context they go into the list that it returns, and not to the model."""
    logits: list[Tensor] = []
    collector = output_capturing._active_collector
    token = collector.set({**(collector.get() or {}), _NAME: logits})
    try:
        yield logits
    finally:
        collector.reset(token)


def give_to_model(logits: Iterable[Tensor]) -> None:
    """Let the model that runs have collected them."""
    output_capturing._active_collector.get()[_NAME].extend(logits)
