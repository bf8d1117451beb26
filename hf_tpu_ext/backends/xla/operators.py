"""Operators that torch_xla would run on the host, in terms of those that it compiles."""

from functools import cache

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
    return library


def _bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """The vision towers of Idefics 3 and SmolVLM find the positions of patches by it."""
    values = values[..., None]
    passed = values >= boundaries if right else values > boundaries
    return passed.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _solve_triangular(
    matrix: Tensor, values: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Linear attention of Qwen3-Next and others solves such a system for each chunk of a row."""
    if not left:
        transposed = _solve_triangular(matrix.mT, values.mT, upper=not upper, unitriangular=unitriangular)
        return transposed.mT
    # An older operator of PyTorch, for the same.
    return torch.triangular_solve(values, matrix, upper=upper, unitriangular=unitriangular)[0]
