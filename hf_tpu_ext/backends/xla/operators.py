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
    library.impl("linalg_solve_triangular", _solve_triangular, "XLA")
    return library


def _solve_triangular(
    matrix: Tensor, values: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Linear attention of Qwen3-Next and others solves such a system for each chunk of a row."""
    if not left:
        transposed = _solve_triangular(matrix.mT, values.mT, upper=not upper, unitriangular=unitriangular)
        return transposed.mT
    # An older operator of PyTorch, for the same.
    return torch.triangular_solve(values, matrix, upper=upper, unitriangular=unitriangular)[0]
