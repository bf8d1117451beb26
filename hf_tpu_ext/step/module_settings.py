"""What a module computes by, besides its tensors."""

from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn


PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a collection of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module itself that are plain, empty dicts of hooks or parameters included."""
    return {name: value for name, value in vars(module).items() if is_plain(value)}
