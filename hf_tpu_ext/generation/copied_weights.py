"""Copies of weights that a program of many tokens reads, in the form that its compiler multiplies by fastest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import psutil
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ..backends.base import Backend
from ..step.layer_scan import LayerStack


# The share of a chip's memory that copies may take while text is generated.
_MOST_MEMORY = 0.25


class CopiedWeights:
    """
    The weights of a model that decoding reads from copies, where loops are a part of programs and copies have room.

    Layers that run as a loop have stacked parameters. Of a slice of them the compiler for TPU makes a part of the product, which
    then cannot begin to load the weight before its turn. XLA for the host multiplies a few rows by a matrix several times faster
    where it need not be transposed, so linear layers have theirs as `(in, out)` there.

    Args:
        model ([`~torch.nn.Module`]):
            The model.
        backend ([`Backend`]):
            The backend in use.
    """

    def __init__(self, model: nn.Module, backend: Backend):
        self._model, self._backend = model, backend
        self._transposes = backend.kernels.platform == "cpu"
        self._stack = next((module for module in model.modules() if isinstance(module, LayerStack)), None)
        in_stack = set() if self._stack is None else set(self._stack.modules())
        self._linear = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if self._transposes and isinstance(module, nn.Linear) and module not in in_stack
        }
        memory = psutil.virtual_memory().total // backend.num_chips if self._transposes else backend.memory_per_chip
        needed = sum(weight.nbytes for weight, _ in self._weights())
        if not backend.loops.in_programs or memory is None or needed > _MOST_MEMORY * memory:
            self._stack, self._linear = None, {}
        self._are_transposed = [self._transposes and is_linear for _, is_linear in self._weights()]

    def __len__(self) -> int:
        return len(self._are_transposed)

    def _weights(self) -> Iterator[tuple[Tensor, bool]]:
        """The weights of now, each with whether it is that of a linear layer, `(out, in)`."""
        for module in self._linear.values():
            yield module.weight.detach(), True
        if self._stack is not None:
            yield from self._stack.weights_of_layers()

    def make(self) -> list[Tensor]:
        """Copy the weights, each whole for every chip."""
        copies = []
        for (weight, _), is_transposed in zip(self._weights(), self._are_transposed, strict=True):
            copies.append(self._backend.gather((weight.mT if is_transposed else weight).clone()))
        return copies

    @contextmanager
    def read(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model reads copies, as they were made, and its layers one by one."""
        weights = (
            copy.mT if is_transposed else copy
            for copy, is_transposed in zip(copies, self._are_transposed, strict=True)
        )
        linear = dict(zip(self._linear, islice(weights, len(self._linear)), strict=True))
        with _reparametrize_module(self._model, linear):
            if self._stack is None:
                yield
            else:
                with self._stack.reading(list(weights)):
                    yield
