"""What a module computes by, besides its tensors."""

from typing import Any

from torch import nn


_PLAIN = (bool, int, float, str, type(None))


def settings_of(module: nn.Module) -> dict[str, Any]:
    """
    Find the attributes of a module, not of those inside it, that are plain: numbers, strings, and collections of them.
    Empty dicts, of hooks or of parameters, are among them.
    """
    return {name: value for name, value in vars(module).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(item, _PLAIN) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)
