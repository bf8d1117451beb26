"""The keys and values of the tokens that a model has seen, in tensors of static shape inside a program."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from ..backends.base import Backend


class _Layer(CacheLayerMixin):
    """
    The cache of a layer, or of layers that are one loop, whose tensors have a first dimension for them.

    Without tensors it takes those of the prompt, which attends to itself. With them it puts the keys and values of one token
    at an index, and the token attends to all of them.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, backend: Backend, length: int, index: Tensor | None, number: Tensor | None):
        super().__init__()
        self.is_initialized = True
        # Not the cache: in a cycle, tensors of a loop's body would live until they are collected, and have no data.
        self._backend, self._length, self._index, self._number = backend, length, index, number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self._index is None:
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        self.keys, keys = self._put(self.keys, key_states)
        self.values, values = self._put(self.values, value_states)
        return keys, values

    def _put(self, cached: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        loops, index = self._backend.loops, self._index
        states = states.to(cached.dtype)
        if self._number is None:
            cached = loops.put_block(cached, states, (None, None, index, None))
            return cached, cached
        cached = loops.put_block(cached, states[None], (self._number, None, None, index, None))
        return cached, loops.take_rows(cached, self._number, 1)[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._index is None else self._length), 0

    def get_seq_length(self) -> int | Tensor:
        return 0 if self._index is None else self._index

    def get_max_length(self) -> int:
        return self._length


class StaticKeyValueCache(Cache):
    """
    A cache for a prompt, or for one token after it, of as many positions as there will ever be.

    What a prompt has put into it becomes the cache of the tokens after it by [`~StaticKeyValueCache.padded`]. Unlike
    [`~transformers.StaticCache`] a prompt attends to its own length only, a token is written by one update of a slice, and
    layers may run as one loop.

    Args:
        backend ([`Backend`]):
            The backend in use.
        num_layers (`int`):
            Layers of the model, or 1 where they run as one loop, see [`~hf_tpu_ext.step.layer_scan.LayerStack`].
        length (`int`):
            Positions.
        index (`torch.Tensor` of shape `()`, int32, *optional*):
            The position of the token. Without it, a prompt is to come.
        tensors (`Sequence[torch.Tensor]`, *optional*):
            Keys and values of each layer, `(rows, heads, length, width)`; in a loop, of all of them: `(layers, rows, heads,
            length, width)`.
        number (`torch.Tensor` of shape `()`, int32, *optional*):
            The layer, where it is one of a loop.
    """

    def __init__(
        self,
        backend: Backend,
        num_layers: int,
        length: int,
        index: Tensor | None = None,
        tensors: Sequence[Tensor] = (),
        number: Tensor | None = None,
    ):
        super().__init__(layers=[_Layer(backend, length, index, number) for _ in range(num_layers)])
        self.backend, self.length, self.index = backend, length, index
        self.put(tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values of each layer."""
        return tuple(chain.from_iterable((layer.keys, layer.values) for layer in self.layers))

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Take other tensors of keys and values."""
        for layer, keys, values in zip(self.layers, tensors[::2], tensors[1::2], strict=False):
            layer.keys, layer.values = keys, values

    def of_layer(self, number: Tensor, tensors: Sequence[Tensor], *index: Tensor) -> "StaticKeyValueCache":
        """The cache of a turn of a loop over layers, by the number of its layer, int32 of shape `()`."""
        return StaticKeyValueCache(self.backend, 1, self.length, *(index or (None,)), tensors, number)

    def padded(self, end: int) -> tuple[Tensor, ...]:
        """The tensors with room for tokens after a prompt, whose last token is before position `end`."""
        return tuple(
            pad(tensor, (0, 0, end - tensor.shape[-2], self.length - end)) for tensor in self.tensors
        )
