"""Attributes that are others for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context, an object has these attributes in the place of its own, which it gets back however the context ends."""
    earlier = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in earlier.items():
            setattr(owner, name, value)
