"""
The memory that generation takes for speed: copies of weights in the form that the compiler multiplies by fastest, and caches of several
lengths, of which a token reads the shortest that holds it.
"""

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
#: Lengths before the last are multiples of it, the width of a vector of a TPU.
MULTIPLE = 128
#: The fewest tokens that a length is for.
LEAST = 32


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
            # The weight of a layer with parametrizations is computed.
            if transposes and isinstance(module, nn.Linear) and "weight" in module._parameters and module not in others
        }
        weights = [(module.weight, module, 1) for module in self._linear.values()]
        if self._stack is not None:
            weights += [(weight, linear, len(weight)) for weight, linear in self._stack.weights()]
        plain, num_bytes = find_plain_linear(model), 0
        # Whether each copy is transposed, and its dtype.
        self._layouts: list[tuple[bool, torch.dtype]] = []
        for weight, linear, count in weights:
            dtype = matmul_dtype(weight) if linear in plain else weight.dtype
            num_bytes += weight.numel() * dtype.itemsize
            self._layouts += [(transposes and linear is not None, dtype)] * count
        if not backend.loops.in_programs or num_bytes > find_room(backend):
            self._stack, self._linear, self._layouts = None, {}, []

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


def choose_cache_lengths(
    cache: Sequence[Tensor], model: nn.Module, prompt: int, new_tokens: int, chips: int, room: int
) -> list[int]:
    """
    Choose the lengths of the cache, one after the other, while tokens are generated.

    Attention reads the whole cache for every token. Where that is more than the weights, which a token reads as well, a cache of
    about half the length comes first, if it has room for the prompt and memory has room for both. Each length is a loop of its
    own, which takes its time to compile.

    Args:
        cache (`Sequence[torch.Tensor]` of shapes `(..., positions, width)`):
            Keys and values of all layers and rows, of any number of positions.
        model ([`~torch.nn.Module`]):
            The model. Weights of a floating dtype are read in the dtype of the cache, others (packed ones) as they are.
        prompt (`int`): Positions of the prompt.
        new_tokens (`int`): Tokens after it, at most.
        chips (`int`): Chips that each have a part of the rows, and all weights.
        room (`int`): Bytes that a shorter cache may take on a chip beside the next one.

    Returns:
        `list[int]`: Positions, ascending. The last has all tokens.
    """
    of_position = sum(tensor.nbytes // tensor.shape[-2] for tensor in cache) // chips
    width = cache[0].dtype.itemsize
    weights = sum(
        weight.numel() * (width if weight.is_floating_point() else weight.dtype.itemsize)
        for weight in model.parameters()
    )
    lengths = [prompt + new_tokens]
    while of_position * lengths[0] > weights:
        half = round(lengths[0] / (2 * MULTIPLE)) * MULTIPLE
        if not prompt + LEAST <= half <= lengths[0] - LEAST or of_position * half > room:
            break
        lengths.insert(0, half)
    return lengths
