"""The seam between the trainers and an accelerator. Nothing outside this folder imports torch_xla."""

from importlib import import_module
from typing import TYPE_CHECKING

from .detect import tpu_chips


if TYPE_CHECKING:
    from .selection import BACKENDS, select_backend

__all__ = ["BACKENDS", "select_backend", "tpu_chips"]


def __getattr__(name: str):
    # What looks at the machine alone works without PyTorch, and where PyTorch does not.
    if name in __all__:
        return getattr(import_module(".selection", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
