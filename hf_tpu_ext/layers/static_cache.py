"""The keys and values of the tokens that a model has seen, in tensors of static shape inside a program."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from ..backends.base import Backend
from .autocast import matmul_dtype


class _Layer(CacheLayerMixin):
    """
    The cache of a layer.

    Without an index it takes the keys and values of the prompt, which attends to itself. With one it puts those of one token
    there, and the token attends to all of them.

    On the host, heads of all rows are one dimension, as products of matrices have them: were they two, XLA would update the cache
    once in each shape, and copy all of it for that. On TPU it does not, and to write a token into such a cache takes longer.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, backend: Backend, length: int, index: Tensor | None):
        super().__init__()
        self.is_initialized = True
        # Not the cache: in a cycle, tensors of a loop's body would live until they are collected, and have no data.
        self._backend, self._length, self._index = backend, length, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        # As attention multiplies them: rope makes float32 of keys.
        dtype = matmul_dtype(key_states)
        key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        of_row, is_merged = key_states.shape[:2], self._backend.kernels.platform == "cpu"
        if is_merged:
            key_states, value_states = key_states.flatten(0, 1), value_states.flatten(0, 1)
        if self._index is not None:
            key_states, value_states = self._put(self.keys, key_states), self._put(self.values, value_states)
        self.keys, self.values = key_states, value_states
        if not is_merged:
            return self.keys, self.values
        # Attention transposes keys. XLA makes that a part of the product where no reshape is between, and else copies all keys.
        return self.keys.mT.unflatten(0, of_row).mT, self.values.unflatten(0, of_row)

    def _put(self, cache: Tensor, states: Tensor) -> Tensor:
        return self._backend.loops.put_block(cache, states, self._index, dim=cache.ndim - 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self._index is None else self._length), 0

    def get_seq_length(self) -> int | Tensor:
        return 0 if self._index is None else self._index

    def get_max_length(self) -> int:
        return self._length


class StaticKeyValueCache(Cache):
    """
    A cache for a prompt, or for one token after it.

    What a prompt has put into it becomes the cache of the tokens after it by [`pad_positions`]. Unlike with
    [`~transformers.StaticCache`], a prompt attends to its own length only, and a token is written by an update of a slice.

    Args:
        backend ([`Backend`]): The backend in use.
        num_layers (`int`): Layers of the model.
        length (`int`): Positions.
        index (`torch.Tensor` of shape `()`, int32, *optional*):
            The position of the token. Without it, a prompt is to come.
        tensors (`Sequence[torch.Tensor]` of shapes `(rows, heads, length, width)` or `(rows * heads, length, width)`, *optional*):
            Keys and values of each layer.
    """

    def __init__(
        self,
        backend: Backend,
        num_layers: int,
        length: int,
        index: Tensor | None = None,
        tensors: Sequence[Tensor] = (),
    ):
        super().__init__(layers=[_Layer(backend, length, index) for _ in range(num_layers)])
        self.length, self.index = length, index
        self.put(tensors)

    def tensors(self, first: int = 0) -> tuple[Tensor, ...]:
        """Keys and values of the layers from number `first` on."""
        return tuple(chain.from_iterable((layer.keys, layer.values) for layer in self.layers[first:]))

    def put(self, tensors: Sequence[Tensor], first: int = 0) -> None:
        """Take other tensors of keys and values, for the layers from number `first` on."""
        for layer, keys, values in zip(self.layers[first:], tensors[::2], tensors[1::2], strict=False):
            layer.keys, layer.values = keys, values


def pad_positions(tensors: Sequence[Tensor], end: int, length: int) -> tuple[Tensor, ...]:
    """Tensors of a [`StaticKeyValueCache`], of `length` positions. The last position that they have is before `end` then."""
    return tuple(pad(tensor, (0, 0, end - tensor.shape[-2], length - end)) for tensor in tensors)
