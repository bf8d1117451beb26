"""Whether anything was traced and has not run yet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.debug.metrics as met


_XLAC = torch_xla._XLAC


def _created() -> int:
    return met.counter_value("CreateXlaTensor") or 0


class PendingGraph:
    """
    Knows where nothing was traced since it was known that nothing was left to run.

    torch_xla goes over all device tensors to tell, a millisecond for a thousand. But each operator makes a tensor, and torch_xla
    counts those: in-place operators too, which are made of others that are not (`functionalization`). Transfers and programs that
    are run by their handle also make some, which are computed.
    """

    def __init__(self):
        self._none_at: int | None = None
        # Without functionalization, operators in place make none.
        self._is_counted = "XLA_DISABLE_FUNCTIONALIZATION" not in os.environ

    def any(self, device: torch.device) -> bool:
        """Whether some tensor of a device is still to be computed."""
        if self._none_at == _created():
            return False
        is_any = any(_XLAC._check_device_tensor_need_materialization(str(device)))
        self.note(none=not is_any)
        return is_any

    def note(self, none: bool) -> None:
        """Note that nothing is left to run, or that something may be."""
        self._none_at = _created() if none and self._is_counted else None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context that makes tensors, and traces nothing."""
        none = self._none_at == _created()
        yield
        if none:
            self._none_at = _created()


#: There is one graph in a process.
pending = PendingGraph()
