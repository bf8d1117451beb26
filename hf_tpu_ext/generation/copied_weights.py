"""Copies of weights that a program of many tokens reads, in the form that its compiler multiplies by fastest."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat

import psutil
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from ..backends.base import Backend
from ..step.autocast import matmul_dtype
from ..step.frozen_weights import find_plain_linear
from ..step.layer_scan import LayerStack


# The share of a chip's memory that copies may take while text is generated.
_MOST_MEMORY = 0.25


class CopiedWeights:
    """
    The weights of a model that decoding reads from copies, where loops are a part of programs and copies have room.

    Layers that run as a loop have stacked parameters. Of a slice of them the compiler for TPU makes a part of the product, which
    then cannot begin to load the weight before its turn. XLA for the host multiplies a few rows by a matrix several times faster
    where it need not be transposed, so linear layers have theirs as `(in, out)` there. Under autocast the matrices of linear
    layers are in its dtype, where nothing else reads them.

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
        others = set() if self._stack is None else set(self._stack.modules())
        self._linear = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            # That of one with parametrizations is computed.
            if self._transposes
            and isinstance(module, nn.Linear)
            and "weight" in module._parameters
            and module not in others
        }
        plain = find_plain_linear(model)
        # Of each weight, whether its copies are transposed, and their dtype.
        self._forms = [
            (self._transposes and linear is not None, matmul_dtype(weight) if linear in plain else weight.dtype)
            for weight, linear in self._weights()
        ]
        memory = psutil.virtual_memory().total // backend.num_chips if self._transposes else backend.memory_per_chip
        needed = sum(
            weight.numel() * dtype.itemsize
            for (weight, _), (_, dtype) in zip(self._weights(), self._forms, strict=True)
        )
        if not backend.loops.in_programs or memory is None or needed > _MOST_MEMORY * memory:
            self._stack, self._linear, self._forms = None, {}, []

    def __len__(self) -> int:
        return sum(self._counts())

    def _weights(self) -> Iterator[tuple[Tensor, nn.Linear | None]]:
        """The weights of now, those of layers in a loop stacked, each with the module if it is the matrix of a linear layer."""
        yield from ((module.weight, module) for module in self._linear.values())
        if self._stack is not None:
            yield from self._stack.weights()

    def _counts(self) -> list[int]:
        """How many copies there are of each weight."""
        num_linear = len(self._linear)
        return [1 if number < num_linear else len(self._stack) for number in range(len(self._forms))]

    def make(self) -> list[Tensor]:
        """Copy the weights, each whole for every chip."""
        copies = []
        for number, ((weight, _), (is_transposed, dtype)) in enumerate(zip(self._weights(), self._forms, strict=True)):
            weight = weight.detach().mT if is_transposed else weight.detach()
            parts = [weight] if number < len(self._linear) else weight.unbind()
            copies += [self._backend.gather(part.to(dtype, copy=True)) for part in parts]
        return copies

    @contextmanager
    def read(self, copies: Sequence[Tensor]) -> Iterator[None]:
        """Within this context the model reads copies, as they were made, and layers of a loop one by one."""
        are_transposed = chain.from_iterable(
            repeat(is_transposed, count) for (is_transposed, _), count in zip(self._forms, self._counts(), strict=True)
        )
        weights = [
            copy.mT if is_transposed else copy for copy, is_transposed in zip(copies, are_transposed, strict=True)
        ]
        num_linear = len(self._linear)
        of_stack = nullcontext() if self._stack is None else self._stack.reading(weights[num_linear:])
        with _reparametrize_module(self._model, dict(zip(self._linear, weights[:num_linear], strict=True))), of_stack:
            yield
