"""What a module computes by, besides its tensors."""

from typing import Any

from torch import nn


_PLAIN = (bool, int, float, str, type(None))


def settings_of(module: nn.Module) -> dict[str, Any]:
    """
    The attributes of a module itself that are numbers, strings, and collections of them, empty dicts of hooks
    included.
    """
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(item, _PLAIN) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)
