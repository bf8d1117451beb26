"""Statistics over some of the elements of a tensor: all are computed with, since how many they are would have to be read."""

from typing import Any

import torch
from torch import Tensor


def nanmin_of_all(values: Tensor, **_: Any) -> Tensor:
    """What `nanmin` of TRL gives of a vector, which picks the elements out: the least number, or NaN where there is none."""
    is_nan = torch.isnan(values)
    return torch.where(is_nan.all(), torch.nan, torch.where(is_nan, torch.inf, values).min())


def nanmax_of_all(values: Tensor, **_: Any) -> Tensor:
    """As [`nanmin_of_all`], of the greatest."""
    return -nanmin_of_all(-values)


def quantile_of_chosen(values: Tensor, is_chosen: Tensor, threshold: float) -> Tensor:
    """What `torch.quantile` gives of the elements that are chosen, of shape `()`; infinity where none is."""
    in_order = torch.where(is_chosen, values, torch.inf).flatten().sort().values
    rank = threshold * (is_chosen.sum() - 1).clamp(min=0).to(values.dtype)
    below = rank.floor()
    lower, upper = (in_order.gather(0, index.long()[None])[0] for index in (below, rank.ceil()))
    return torch.lerp(lower, upper, rank - below)
