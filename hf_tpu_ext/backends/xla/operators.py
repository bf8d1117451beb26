"""Operators that torch_xla would run on the host, in terms of those that it compiles, and two that it computes wrongly."""

import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


@cache
def register_operators() -> Library:
    """
    Make PyTorch compute these operators on XLA by the functions here. Without them torch_xla fetches their arguments, and a step
    is cut in pieces. Their gradients are PyTorch's own.
    """
    library = Library("aten", "IMPL")
    library.impl("bucketize.Tensor", _bucketize, "XLA")
    library.impl("linalg_solve_triangular", _solve_triangular, "XLA")
    library.impl("complex", _complex, "XLA")
    library.impl("polar", _polar, "XLA")
    library.impl("unfold_copy", _unfold, "XLA")
    library.impl("unfold_backward", _unfold_backward, "XLA")
    # Of autograd: it is made of another operator, which has a gradient. Without autograd, upstream's own is left.
    library.impl("batch_norm", _batch_norm, "AutogradXLA")
    cumsum = partial(_cumsum, torch.library.get_kernel("aten::cumsum", "XLA"))
    with warnings.catch_warnings():
        # PyTorch warns of a second implementation.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("cumsum", cumsum, "XLA", with_keyset=True, allow_override=True)
    return library


def _cumsum(
    kernel: Any, keys: torch.DispatchKeySet, values: Tensor, dim: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """torch_xla sums booleans to booleans, by which a mask has one document where it has several."""
    if dtype is None and not values.is_floating_point() and not values.is_complex():
        dtype = torch.int64
    return kernel.call_boxed(keys, values, dim, dtype=dtype)


def _batch_norm(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """
    torch_xla's running variance is that of the sample, where PyTorch divides by one less than the number of values; and what
    is normalized by running statistics has no gradient there.
    """
    if not training:
        shape = [-1 if dim == 1 else 1 for dim in range(values.ndim)]
        scale = (variance + eps).rsqrt()
        if weight is not None:
            scale = scale * weight
        values = (values - mean.view(shape)) * scale.view(shape)
        return values if bias is None else values + bias.view(shape)
    # A copy, since the backward pass wants what it was given to be as it was.
    new_variance = None if variance is None else variance.clone()
    result, _, _ = torch.native_batch_norm(values, weight, bias, mean, new_variance, training, momentum, eps)
    if variance is not None:
        with torch.no_grad():
            others = values.numel() // values.shape[1] - 1
            variance.mul_((momentum - 1) / others).add_(new_variance, alpha=1 + 1 / others)
    return result


def _bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """The vision towers of Idefics 3 and SmolVLM find the positions of patches by it."""
    values = values[..., None]
    is_beyond = values >= boundaries if right else values > boundaries
    return is_beyond.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _solve_triangular(
    matrix: Tensor, values: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Linear attention of Qwen3-Next and others solves such a system for each chunk of a row."""
    if not left:
        solution = _solve_triangular(matrix.mT, values.mT, upper=not upper, unitriangular=unitriangular)
        return solution.mT
    # An older operator of PyTorch, for the same.
    return torch.triangular_solve(values, matrix, upper=upper, unitriangular=unitriangular)[0]


def _windows(length: int, size: int, step: int, device: torch.device) -> Tensor:
    """The positions of each window: `(windows, size)`."""
    begins = torch.arange(0, length - size + 1, step, device=device)
    return begins[:, None] + torch.arange(size, device=device)


def _unfold(values: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """The windows of a convolution that is written out, as in Inkling 2."""
    dimension %= max(values.ndim, 1)
    windows = _windows(values.shape[dimension], size, step, values.device)
    elements = values.index_select(dimension, windows.flatten())
    return elements.unflatten(dimension, windows.shape).movedim(dimension + 1, -1)


def _unfold_backward(gradient: Tensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> Tensor:
    dim %= max(len(input_sizes), 1)
    windows = _windows(input_sizes[dim], size, step, gradient.device)
    parts = gradient.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return gradient.new_zeros(input_sizes).index_add(dim, windows.flatten(), parts)


def _complex(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.ops.aten.view_as_complex_copy(torch.stack([real, imaginary], -1))


def _polar(radius: Tensor, angle: Tensor) -> Tensor:
    """Positions of Llama 4 and DeepSeek V2 are rotations in the complex plane."""
    return _complex(radius * angle.cos(), radius * angle.sin())
