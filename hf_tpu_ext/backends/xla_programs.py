"""Programs of torch_xla that are recorded and replayed, and the buffers that they are given."""

import os
import weakref
from collections.abc import Sequence
from itertools import compress

import torch
import torch_xla

from .base import Backend
from .program import Programs
from .xla_replay import XLARecording
from .xla_tensors import XLARealCopies, computed, give_own_buffers, live_tensors, memory_shared


class XLAPrograms(Programs):
    """Programs of torch_xla."""

    def __init__(self, backend: Backend):
        self._backend = backend
        # What is recorded holds the training state, which the backend outlives.
        self._recording: weakref.ref[XLARecording] | None = None

    def record(self, state: Sequence[torch.Tensor]) -> XLARecording:
        self._backend.flush()
        recording = XLARecording(self._backend.device, state, self._backend.hosts)
        self._recording = weakref.ref(recording)
        return recording

    def note_sent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tell a recording under way of tensors that were sent to the device meanwhile."""
        if self._recording is not None and (recording := self._recording()) is not None:
            recording.add_other(tensors)

    def keeps(self, compiles: int) -> bool:
        # So many compiled programs torch_xla keeps before it drops the one that was not used for longest.
        kept = int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", 2048))
        return self._backend.compiles() - compiles < kept

    def memory_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
        return [
            *torch_xla._XLAC._get_tensors_handle(on_device),
            *(tensor.data_ptr() for tensor in tensors if tensor.device.type != "xla"),
        ]

    def aliased(self, state: Sequence[torch.Tensor]) -> set[int]:
        # Detached ones of a `state_dict()`, or `parameter.data`.
        counts = [torch._C._storage_Use_Count(memory_shared(tensor)) for tensor in state]
        return {place for place, count in enumerate(counts) if count > 1}

    def without_base(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type != "xla" or computed([tensor]) else tensor.clone()

    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:
        # To torch_xla a copy is the same value, so it shares the buffer of what it was made of, until one of them is changed
        # by a program that knows both. On several chips, a buffer that is still to be filled has no handle to ask for.
        self._backend.wait()
        state = computed(state)
        known = {memory_shared(tensor) for tensor in state}
        others = [tensor for tensor in computed(live_tensors()) if memory_shared(tensor) not in known]
        if others:
            buffers = set(torch_xla._XLAC._get_tensors_handle(state))
            of_others = torch_xla._XLAC._get_tensors_handle(others)
            give_own_buffers(list(compress(others, [buffer in buffers for buffer in of_others])))
        self._backend.flush()

    def real_copies(self) -> XLARealCopies:
        return XLARealCopies()
