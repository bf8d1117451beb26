"""Copies of weights that a program of many tokens reads, in the form that its compiler multiplies by fastest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import psutil
import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ..backends.base import Backend
from ..layers.autocast import matmul_dtype
from ..layers.frozen_weights import find_plain_linear
from ..layers.layer_scan import LayerStack


# The share of a chip's memory that copies of weights may take while text is generated, and a second cache as much again.
_MOST_MEMORY = 0.25


def find_room(backend: Backend) -> int:
    """Bytes of a chip's memory that copies of weights, or a second cache, may take while text is generated; 0 if unknown."""
    on_host = backend.kernels.platform == "cpu"
    memory = psutil.virtual_memory().total // backend.num_chips if on_host else backend.memory_per_chip
    return int(_MOST_MEMORY * (memory or 0))


class CopiedWeights:
    """
    The weights of a model that decoding reads from copies, where loops are a part of programs and copies have room.

    Layers that run as a loop have stacked parameters. Of a slice of them the compiler for TPU makes a part of the
    product, which then cannot begin to load the weight before its turn. XLA for the host multiplies a few rows by a
    matrix faster where it need not be transposed, so linear layers have theirs as `(in, out)` there. Under autocast
    the matrices of linear layers are in its dtype, where nothing else reads them.
    """

    def __init__(self, model: nn.Module, backend: Backend):
        self._model, self._backend = model, backend
        transposes = backend.kernels.platform == "cpu"
        self._stack = next((module for module in model.modules() if isinstance(module, LayerStack)), None)
        others = set() if self._stack is None else set(self._stack.looped_modules())
        self._linear = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            # That of one with parametrizations is computed.
            if transposes and isinstance(module, nn.Linear) and "weight" in module._parameters and module not in others
        }
        weights = [(module.weight, module, 1) for module in self._linear.values()]
        if self._stack is not None:
            weights += [(weight, linear, len(weight)) for weight, linear in self._stack.weights()]
        plain, num_bytes = find_plain_linear(model), 0
        # Of each copy, whether it is transposed, and its dtype.
        self._layouts: list[tuple[bool, torch.dtype]] = []
        for weight, linear, count in weights:
            dtype = matmul_dtype(weight) if linear in plain else weight.dtype
            num_bytes += weight.numel() * dtype.itemsize
            self._layouts += [(transposes and linear is not None, dtype)] * count
        if not backend.loops.in_programs or num_bytes > find_room(backend):
            self._stack, self._linear, self._layouts = None, {}, []

    def __len__(self) -> int:
        return len(self._layouts)

    @torch.no_grad()
    def make(self) -> list[Tensor]:
        """Copy the model's current weights, each whole for every chip."""
        weights = [module.weight for module in self._linear.values()]
        if self._stack is not None:
            weights += [part for weight, _ in self._stack.weights() for part in weight.unbind()]
        return [
            self._backend.gather((weight.mT if is_transposed else weight).to(dtype, copy=True))
            for weight, (is_transposed, dtype) in zip(weights, self._layouts, strict=True)
        ]

    @contextmanager
    def read(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model reads copies, as they were made, and layers of a loop one by one."""
        weights = [
            copy.mT if is_transposed else copy for copy, (is_transposed, _) in zip(copies, self._layouts, strict=True)
        ]
        num_linear = len(self._linear)
        of_stack = nullcontext() if self._stack is None else self._stack.reading(weights[num_linear:])
        with _reparametrize_module(self._model, dict(zip(self._linear, weights[:num_linear], strict=True))), of_stack:
            yield
