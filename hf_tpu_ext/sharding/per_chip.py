"""Parts of a program that each chip runs by itself, with gradients through them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import trl.trainer.utils

from ..backends.base import Backend
from ..step.replaced_head import head_computed_by


class EnterChip(torch.autograd.Function):
    """
    [`Backend.enter_chip`] with a gradient: that of rows stays with the rows, that of a whole tensor is summed over chips.
    """

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, backend: Backend, by_rows: bool) -> torch.Tensor:
        ctx.backend, ctx.by_rows = backend, by_rows
        return backend.enter_chip(tensor, by_rows)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.by_rows:
            return ctx.backend.leave_chip(gradient), None, None
        return ctx.backend.leave_chip(gradient[None]).sum(0), None, None


class LeaveChip(torch.autograd.Function):
    """[`Backend.leave_chip`] with a gradient."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, backend: Backend) -> torch.Tensor:
        ctx.backend = backend
        # What is not trained on, such as the entropy, has no gradient to compute.
        ctx.set_materialize_grads(False)
        return backend.leave_chip(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if gradient is None else ctx.backend.enter_chip(gradient, by_rows=True), None


def _score_per_chip(backend: Backend, score: Callable, hidden, weight, bias, targets, *settings: Any) -> tuple:
    if hidden.shape[0] % backend.num_chips:
        return score(hidden, weight, bias, targets, *settings)
    with backend.on_each_chip():
        outputs = score(
            EnterChip.apply(hidden, backend, True),
            EnterChip.apply(weight, backend, False),
            None if bias is None else EnterChip.apply(bias, backend, False),
            backend.enter_chip(targets, by_rows=True),
            *settings,
        )
    return tuple(None if output is None else LeaveChip.apply(output, backend) for output in outputs)


@contextmanager
def score_tokens_per_chip(backend: Backend) -> Iterator[None]:
    """
    Within this context, TRL's fused language model head scores tokens on the chip that has them.

    Left to the partitioner, tokens and slices of the head cross between chips several times over. Each chip by itself takes
    its own tokens, with the whole head.

    Args:
        backend ([`Backend`]):
            The backend in use.
    """
    if backend.num_chips == 1:
        yield
        return
    with head_computed_by(partial(_score_per_chip, backend, trl.trainer.utils._ChunkedLogProbFunction.apply)):
        yield
