"""Rotary position embeddings whose halves change places in the matrix units: the others move parts of a vector slowly."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backends.base import Backend
from .autocast import matmul_dtype


# The function of transformers' models that swaps the halves of a head, and what it makes of the numbers from 0 to 7.
_NAME, _ROTATED = "rotate_half", [-4.0, -5.0, -6.0, -7.0, 0.0, 1.0, 2.0, 3.0]


def use_matrix_rope(model: nn.Module, backend: Backend) -> None:
    """
    Let transformers' models swap the halves of queries and keys by a product with a permutation, on the backend's device, where
    attention computes in bfloat16. float32 keeps 16 bits of its 24 then, of which that uses 8.

    The code of a model calls the function by its name in the module; this is where it is replaced, where it does what is known.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            code = vars(sys.modules[type(module).__module__])
            upstream = code.get(_NAME)
            if upstream is not None and upstream(torch.arange(8.0)).tolist() == _ROTATED:
                code[_NAME] = _RotateHalf(
                    upstream.upstream if isinstance(upstream, _RotateHalf) else upstream, backend
                )


class _RotateHalf:
    def __init__(self, upstream: Callable[[Tensor], Tensor], backend: Backend):
        self.upstream, self._backend = upstream, backend

    def __call__(self, tensor: Tensor) -> Tensor:
        # Who computes in float32 may have asked for products that keep all bits.
        if tensor.device.type != self._backend.device.type or matmul_dtype(tensor) != torch.bfloat16:
            return self.upstream(tensor)
        return _Product.apply(tensor, self._backend)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        return _rotate(tensor, backend)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        # Rotated twice, a tensor is negative and as long as it was: this is the transpose.
        return -_rotate(gradient, ctx.backend), None


def _rotate(tensor: Tensor, backend: Backend) -> Tensor:
    places = torch.arange(tensor.shape[-1], device=tensor.device)
    half = tensor.shape[-1] // 2
    permutation = (places[:, None] == places - half).bfloat16() - (places[:, None] == places + half).bfloat16()
    with torch.autocast(tensor.device.type, enabled=False):
        if tensor.dtype == torch.bfloat16:
            return tensor @ permutation
        # Each result is one number of bfloat16, so the products are exact: of the first eight bits, and of the next.
        first = backend.kernels.round_down(tensor)
        rest = (tensor - first).bfloat16()
        return (first.bfloat16() @ permutation).float() + (rest @ permutation).float()
