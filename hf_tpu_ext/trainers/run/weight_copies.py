"""Copies of weights that are made during a run."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ...backends.base import Backend
from ...temporarily import temporarily


_NEVER_COPIES = ("hf_tpu_ext.", "transformers.")


class WeightCopies:
    """Lets user code copy weights as on an eager device, where steps give their buffers to compiled programs."""

    def __init__(self, backend: Backend):
        self._backend = backend
        #: Entered during runs with code of the user's between steps, where programs are compiled.
        self.context = backend.programs.real_copies() if backend.traces_steps else None
        #: Makes a context of code that runs thousands of operators and keeps nothing.
        self.not_made: Callable[[], AbstractContextManager] = nullcontext

    @contextmanager
    def real(self, objects: Iterable[object], functions: Iterable[Callable | None]) -> Iterator[None]:
        """
        Context of a run, in which methods of `objects` and `functions` are called. Copies of device tensors that are made in it,
        outside of steps, have memory of their own.
        """
        # Each call of an operator takes longer in it. Trackers and progress bars copy no weights.
        never = all(type(each).__module__.startswith(_NEVER_COPIES) for each in objects) and all(
            function is None for function in functions
        )
        if self.context is None or never:
            yield
            return
        with temporarily(self, not_made=self.context.suspend), self.context:
            yield

    def separate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give copies of weights and moments that were made before this run memory of their own."""
        if self.context is None:
            return
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.buffers(), *moments]
        device = self._backend.device.type
        self._backend.programs.separate_copies(
            [value for value in tensors if isinstance(value, Tensor) and value.device.type == device]
        )
        self.context.has_aliases = True
