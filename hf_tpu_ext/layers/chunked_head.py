"""TRL's fused language model head: another in its place, and one that is a loop, so that memory and graph stay small."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
import trl.trainer.utils
from torch import Tensor
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, _backward_tile, _forward_tile

from ..backends.base import Backend
from ..temporarily import temporarily
from .autocast import matmul_dtype


# Elements of a tile of logits, which all tokens and a slice of the vocabulary span; and the narrowest slice.
_TILE_ELEMENTS = 2**24
_LEAST_SLICE = 1024


def head_computed_by(apply: Callable[..., tuple]) -> AbstractContextManager[None]:
    """
    Within this context, TRL's fused language model head is computed by `apply`, which is called as
    `trl.kernels.ChunkedLogProbFunction.apply`. The outermost context decides.
    """
    is_decided = isinstance(trl.trainer.utils._ChunkedLogProbFunction, SimpleNamespace)
    return nullcontext() if is_decided else head_wrapped_by(lambda _: apply)


def head_wrapped_by(wrap: Callable[[Callable], Callable]) -> AbstractContextManager[None]:
    """Within this context, TRL's fused language model head is computed by `wrap(apply)` of what computes it outside."""
    wrapped = SimpleNamespace(apply=wrap(trl.trainer.utils._ChunkedLogProbFunction.apply))
    return temporarily(trl.trainer.utils, _ChunkedLogProbFunction=wrapped)


class LoopedLogProbs(torch.autograd.Function):
    """
    `trl.kernels.ChunkedLogProbFunction`, with the slices of the vocabulary as the iterations of one loop. It is applied to a backend, and
    then as upstream's; `chunk_size` is the width of upstream's slices, which is not that of these.

    Upstream's is a loop of Python, of which XLA sees every turn: the program grows with the tokens and with the
    vocabulary, and with it the memory, since the compiler overlaps the turns. What a turn computes is upstream's, too. The
    backward pass computes each tile of logits anew, and the gradient of a slice of the head in the turn of that slice.

    Of a frozen head, no logits are computed twice. With respect to the hidden state, the gradient of a log-probability is the
    target's row of the head less the mean of all rows, weighted by their probabilities, which the forward pass sums up as it
    does the exponentials (as in Rabe & Staats 2021, arXiv:2112.05682: attention whose keys and values are the head's rows).
    """

    @staticmethod
    def forward(
        ctx,
        backend: Backend,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = OPTIONAL_OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = matmul_dtype(hidden)
        ctx.backend, ctx.is_manual = backend, backend.manual_sharding.active
        ctx.transform = {
            "logit_scale": scale,
            "softcap": softcap or 1.0,
            "inv_t": 1 / temperature,
            "HAS_SOFTCAP": softcap is not None,
            "BLOCK_SIZE": None,
        }
        # What the derivative of a soft cap is depends on each logit.
        ctx.factor = (
            scale / temperature if softcap is None and ctx.needs_input_grad[1:4] == (True, False, False) else None
        )
        flags = {f"HAS_{name.upper()}": name in outputs for name in OPTIONAL_OUTPUTS}
        (tokens, _), vocabulary = hidden.shape, weight.shape[0]

        def fold(start: Tensor, size: int, constants: tuple, carry: tuple) -> tuple:
            hidden, weight, bias, targets = constants
            *sums, mean_row = carry
            rows = _rows(weight, start, size, ctx)
            tile = _logits(hidden, rows, bias, start, ctx)
            largest = sums[0].clone()
            _forward_tile(tile, None, targets - start, *sums, 0, size, **flags, **ctx.transform)
            if ctx.factor is not None:
                weights = torch.exp(tile.float() * scale * (1 / temperature) - sums[0][:, None]).to(ctx.dtype)
                mean_row = mean_row * torch.exp(largest - sums[0])[:, None] + weights.float() @ rows.float()
            return (*sums, mean_row)

        zero = torch.zeros((tokens,), dtype=torch.float32, device=hidden.device)
        lowest = torch.full_like(zero, -torch.inf)
        # The largest logit z; sums of exp(z), z exp(z), exp(z)**2 and z; the largest before the target, and the target's.
        sums = tuple(start.clone() for start in (lowest, zero, zero, zero, zero, lowest, zero))
        # The mean of the rows, times the sum of exponentials.
        mean_row = None if ctx.factor is None else torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        sums = _over_slices(fold, (hidden, weight, bias, targets), (*sums, mean_row), backend)
        largest, total, z_total, square_total, z_sum, before_target, target, mean_row = sums
        log_total = largest + total.log()
        all_outputs = {
            "entropy": log_total - z_total / total,
            "log_sum_sq_probs": square_total.log() - 2 * total.log(),
            "mean_logits": z_sum / vocabulary,
            "is_top1": (target >= largest) & (target > before_target),
        }
        results = tuple(all_outputs[name] if name in outputs else None for name in OPTIONAL_OUTPUTS)
        towards_target = None
        if ctx.factor is not None:
            towards_target = weight[targets].to(ctx.dtype).float() - mean_row / total[:, None]
        ctx.save_for_backward(hidden, weight, bias, targets, log_total, all_outputs["entropy"], towards_target)
        ctx.mark_non_differentiable(*(result for result in results[1:] if result is not None))
        return target - log_total, *results

    @staticmethod
    def backward(ctx, log_probs_grad, entropy_grad, *_):
        hidden, weight, bias, targets, log_total, entropy, towards_target = ctx.saved_tensors
        if towards_target is not None and entropy_grad is None:
            return None, (ctx.factor * log_probs_grad[:, None] * towards_target).to(hidden.dtype), *[None] * 8
        _, needs_weight, needs_bias = ctx.needs_input_grad[1:4]

        def differentiate(start: Tensor, size: int, constants: tuple, gradients: tuple) -> tuple:
            hidden, weight, bias, targets, *by_token = constants
            hidden_grad, weight_grad, bias_grad = gradients
            rows = _rows(weight, start, size, ctx)
            tile = _logits(hidden, rows, bias, start, ctx)
            slots = [log_total if tensor is None else tensor for tensor in by_token]
            _backward_tile(
                tile,
                None,
                targets - start,
                *slots,
                0,
                size,
                HAS_LOGPROB_GRAD=log_probs_grad is not None,
                HAS_ENTROPY_GRAD=entropy_grad is not None,
                **ctx.transform,
            )
            # From the dtype of the tile to sums in float32, as upstream has it.
            tile = tile.float()
            hidden_grad = hidden_grad + tile @ rows.float()
            if needs_weight:
                weight_grad = ctx.backend.loops.put_rows(weight_grad, start, tile.T @ hidden.to(ctx.dtype).float())
            if needs_bias:
                bias_grad = ctx.backend.loops.put_rows(bias_grad, start, tile.sum(0))
            return hidden_grad, weight_grad, bias_grad

        def zeros(tensor: Tensor, is_needed: bool) -> Tensor | None:
            return torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) if is_needed else None

        gradients = (zeros(hidden, True), zeros(weight, needs_weight), zeros(bias, needs_bias))
        constants = (hidden, weight, bias, targets, log_total, entropy, log_probs_grad, entropy_grad)
        with ctx.backend.manual_sharding.region(ctx.is_manual):
            gradients = _over_slices(differentiate, constants, gradients, ctx.backend)
        gradients = (
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, (hidden, weight, bias), strict=True)
        )
        return None, *gradients, *[None] * 6


def _rows(weight: Tensor, start: Tensor, size: int, ctx) -> Tensor:
    """A slice `(size, hidden_size)` of the head in the dtype of the matrix product."""
    rows = ctx.backend.loops.take_rows(weight, start, size)
    return rows if rows.dtype == ctx.dtype else ctx.backend.loops.prevent_hoisting(rows).to(ctx.dtype)


def _logits(hidden: Tensor, rows: Tensor, bias: Tensor | None, start: Tensor, ctx) -> Tensor:
    """A tile `(tokens, size)` of logits in the dtype of the matrix product, before upstream's scale and softcap."""
    tile = hidden.to(ctx.dtype) @ rows.T
    return tile if bias is None else tile + ctx.backend.loops.take_rows(bias, start, len(rows)).to(ctx.dtype)


def _over_slices(body: Callable, constants: tuple, carry: tuple, backend: Backend) -> tuple:
    """
    Go through the vocabulary: whole slices are the iterations of the loop, and what is left is one with fewer columns.

    `body(start, size, constants, carry)` is called for each, and returns the next `carry`; that of the last is returned. The loop
    carries the constants as well, which begin with the hidden states and the weight: each iteration would compute them anew.
    """
    tokens, vocabulary = (tensor.shape[0] for tensor in constants[:2])
    size = min(vocabulary, max(_LEAST_SLICE, _TILE_ELEMENTS // tokens // _LEAST_SLICE * _LEAST_SLICE))
    count, rest = divmod(vocabulary, size)
    starts = torch.arange(0, count * size, size, device=constants[0].device)

    def iteration(loop_carry: tuple, entries: tuple) -> tuple:
        constants, carry = loop_carry
        return (constants, body(entries[0], size, constants, carry)), ()

    # Autocast is off: `body` chooses the dtypes itself.
    with torch.no_grad(), torch.autocast(starts.device.type, enabled=False):
        (_, carry), _ = backend.loops.scan(iteration, (constants, carry), (starts,))
        if rest:
            carry = body(torch.full((), count * size, device=starts.device), rest, constants, carry)
    return carry
