"""The seam between the trainers and an accelerator. Nothing outside this folder imports torch_xla."""

from .detect import tpu_chips
from .selection import BACKENDS, select_backend


__all__ = ["BACKENDS", "select_backend", "tpu_chips"]
