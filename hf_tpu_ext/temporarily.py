"""Attributes that are others for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """
    Within this context, an object has these attributes in the place of its own, which it gets back however the context ends. What it
    had of its class, it has of its class again.
    """
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
