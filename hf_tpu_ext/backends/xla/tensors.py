"""Device tensors that people hold, copy and save: what an eager device does with them, done for lazy ones."""

import copy
import copyreg
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch_xla
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compiled_function import RealCopies
from .graphs import pending


_XLAC = torch_xla._XLAC
_COPIES_IN_PLACE = (torch.Tensor.copy_, torch._foreach_copy_)


def live_tensors() -> list[torch.Tensor]:
    """All device tensors of this process that Python knows of."""
    # By the type: lazy modules are imported where they are asked for their class.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return _on_device(tensors)


def _on_device(tensors: Sequence[Any]) -> list[torch.Tensor]:
    # Not by its device: a parameter whose tensor is gone, though its object is not, has none.
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_xla]


def select_computed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose values are in a buffer, and not still to be computed."""
    tensors = list(tensors)
    return list(compress(tensors, [not pending for pending in _XLAC._check_tensor_need_materialization(tensors)]))


def memory_shared(tensor: torch.Tensor) -> int:
    """Identity of what a tensor shares with those that are detached from it or views of it."""
    return tensor.untyped_storage()._cdata


def give_own_buffers(tensors: Sequence[torch.Tensor]) -> None:
    """Give tensors that share a buffer with others one of their own."""
    # What is computed is a result of the next program, and a result has a buffer of its own. Not an optimization barrier: in
    # one program with a part that each chip runs by itself, it makes the compiler abort.
    for tensor in tensors:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor = tensor.detach()
            tensor.bitwise_or_(False) if tensor.dtype == torch.bool else tensor.mul_(1)


class XLARealCopies(TorchFunctionMode, RealCopies):
    """
    Context in which copies of device tensors have buffers of their own, as on an eager device. Replayed programs are given
    the buffers of the weights.

    Each call from Python of an operator takes some microseconds longer in it.
    """

    def __init__(self):
        super().__init__()
        self.has_aliases = True
        self._is_suspended = False

    def __torch_function__(self, func: Callable, types, args=(), kwargs=None) -> Any:
        if self._is_suspended:
            return func(*args, **(kwargs or {}))
        if func in _COPIES_IN_PLACE:
            # A 0, 1 or -1 of the host is to be computed, as a constant, though no operator has made a tensor for it.
            pending.note(none=False)
            source, kwargs = tree_map_only(torch.Tensor, _real_copy, (args[1:], kwargs or {}))
            args = (*args[:1], *source)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            results = _on_device([result])
        else:
            results = _on_device(result) if type(result) in (list, tuple) else []
        if results:
            self.has_aliases = True
            # What is read from an attribute is no copy.
            if func.__name__ != "__get__":
                # The other argument of a deep copy has all copies so far, this one too.
                sources = args[:1] if func is torch.Tensor.__deepcopy__ else (args, kwargs)
                give_own_buffers(_find_copies(func, results, _on_device(tree_leaves(sources))))
        return result

    @contextmanager
    def suspend(self) -> Iterator[None]:
        if self._is_suspended:
            yield
            return
        # Where another was entered since, this one is passed through.
        self._is_suspended, is_innermost = True, torch.overrides._get_current_function_mode() is self
        if is_innermost:
            torch.overrides._pop_mode()
        try:
            yield
        finally:
            self._is_suspended = False
            if is_innermost:
                torch.overrides._push_mode(self)


def _find_copies(
    func: Callable, results: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The results that may share a buffer with what they were made of, or with another number: torch_xla sends equal ones once."""
    numbers = [tensor for tensor in results if tensor.dim() == 0]
    if func in _COPIES_IN_PLACE:
        return numbers
    source_memory = set(map(memory_shared, sources))
    return [
        tensor
        for tensor in select_computed(results if sources else numbers)
        if memory_shared(tensor) not in source_memory
    ]


def _real_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "xla" and select_computed([tensor]):
        tensor = tensor.detach().clone()
        give_own_buffers([tensor])
    return tensor


# ---- Pickles: `torch.save` ----

# By what they were made of. A pickle holds on to what it writes until it is finished.
_on_host: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()


def _reduce(tensor: torch.Tensor) -> tuple:
    if tensor.device.type != "xla":
        return tensor.__reduce_ex__(2)
    on_host = tensor.detach().cpu().contiguous()
    # Detached tensors have the number of what they are detached from, so that weights that are tied stay so in the file.
    number = _XLAC._xla_get_tensor_id(tensor)
    stored_values = torch.empty(0, dtype=tensor.dtype)
    if number in _on_host:
        stored_values.set_(_on_host[number])
    if torch.equal(stored_values, on_host.flatten()):
        on_host = stored_values.view(on_host.shape)
    else:
        _on_host[number] = on_host.untyped_storage()
    vars(on_host).update(vars(tensor))
    return on_host.requires_grad_(tensor.requires_grad).__reduce_ex__(2)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "xla":
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return copy._reconstruct(tensor, None, *tensor.__reduce_ex__(4))


def pickle_from_host() -> None:
    """Have device tensors pickled as CPU tensors, which load anywhere. By default they load onto an XLA device only."""
    copyreg.pickle(torch.Tensor, _reduce)
    # `copy.copy` asks the same register.
    copy._copy_dispatch[torch.Tensor] = _copy
