"""The autocast that is on, for what is computed later or by other means."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch


def current_autocast(device_type: str) -> Callable[[], AbstractContextManager]:
    """Note the autocast that is on. What is returned makes a context with it, as often as it is called."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )


def matmul_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype that a matrix product of a tensor is computed in: that of the autocast that is on, or the tensor's."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype
