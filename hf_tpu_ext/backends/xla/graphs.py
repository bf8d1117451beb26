"""torch_xla's private calls for graphs that are compiled once and then run by their handle. No other file has them."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from ..compiled_function import CannotReplay


_XLAC = torch_xla._XLAC

#: torch_xla's counter of programs run by their handle alone.
REPLAYS = "ReplayedProgram"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _or_trace(function: _Function) -> _Function:
    """
    Have a call that torch_xla lacks or that fails raise [`CannotReplay`]. These are private, and another version or runtime may
    not have them: a run then traces its steps.
    """

    @wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise CannotReplay(
                f"torch_xla {torch_xla.__version__} cannot {function.__name__.replace('_', ' ')} "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); please report this line"
            ) from error

    return call


# ---- What was traced and has not run yet ----


def _count_tensors_made() -> int:
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
        # What is told of tensors that are sent: the trace that was begun last, while it is there. It holds the training state.
        self._trace: weakref.ref | None = None
        # Without functionalization, operators in place make none.
        self._is_counted = "XLA_DISABLE_FUNCTIONALIZATION" not in os.environ

    def any(self, device: torch.device) -> bool:
        """Whether some tensor of a device is still to be computed."""
        if self._none_at == _count_tensors_made():
            return False
        is_any = any(_XLAC._check_device_tensor_need_materialization(str(device)))
        self.note(none=not is_any)
        return is_any

    def note(self, none: bool) -> None:
        """Note that nothing is left to run, or that something may be."""
        self._none_at = _count_tensors_made() if none and self._is_counted else None

    @contextmanager
    def trace_nothing(self) -> Iterator[None]:
        """Context that makes tensors, and traces nothing."""
        none = self._none_at == _count_tensors_made()
        yield
        if none:
            self._none_at = _count_tensors_made()

    def begin_trace(self, trace: Any) -> None:
        """Tell a trace, by its `note_sent`, of tensors that are sent from now on."""
        self._trace = weakref.ref(trace)

    def send(self, tensors: list[torch.Tensor], device: torch.device, shardings: list | None) -> list[torch.Tensor]:
        """Send tensors of the host, which traces nothing."""
        with self.trace_nothing():
            device_tensors = _XLAC._xla_tensors_from_aten(tensors, [str(device)] * len(tensors), shardings)
        if self._trace is not None and (trace := self._trace()) is not None:
            trace.note_sent(device_tensors)
        return device_tensors


#: There is one graph in a process.
pending = PendingGraph()


# ---- Graphs and their buffers ----


@_or_trace
def identify_buffers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Identities of the device buffers of tensors. Tensor ids will not do: a tensor with new data has the id of that."""
    return _XLAC._get_tensors_handle(list(tensors))


@_or_trace
def hold_buffers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that hold the buffers that these are in now, or that these are computed from: the arguments of their graph."""
    return _XLAC._get_tensors_xla_device_data_node(list(tensors))[1]


@_or_trace
def sort_results(
    results: Sequence[torch.Tensor], old_buffers: Sequence[int | None]
) -> tuple[list[int], list[torch.Tensor], list[int]]:
    """
    Sort the results of a graph as the arguments that they replace, which are given by their buffers. Of arguments and results that
    are as large, the compiler gives the first the memory of the first and so on, whatever their shapes are: others it would copy.
    Returned are the numbers of the results, the arguments, and the buffers of these.
    """

    def arguments() -> tuple[list[torch.Tensor], list[int]]:
        values = hold_buffers([results[number] for number in order])
        return values, identify_buffers(values)

    order = list(range(len(results)))
    # The order of the arguments follows from that of the results, in part: the second time, they agree.
    for _ in range(2):
        ranks = {buffer: rank for rank, buffer in enumerate(arguments()[1])}
        order.sort(key=lambda number: (old_buffers[number] is None, ranks.get(old_buffers[number], len(ranks))))
    return order, *arguments()


@_or_trace
def find_pending(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Of each tensor, whether it was traced and is not run yet."""
    return _XLAC._check_tensor_need_materialization(list(tensors))


@_or_trace
def count_pending(device: torch.device) -> int:
    """How many tensors of a device were traced and are not run yet."""
    return sum(_XLAC._check_device_tensor_need_materialization(str(device)))


@_or_trace
def hash_graph(results: Sequence[torch.Tensor], donations: Sequence[torch.Tensor]) -> bytes:
    """The handle of the graph of tensors: a hash of everything in it, with the arguments whose buffers it is given."""
    for value in donations:
        _XLAC._set_buffer_donation(value, True)
    with alias_with_buffer_donor_config():
        return _XLAC._get_graph_hash(list(results))


@_or_trace
def read_placements(tensors: Sequence[torch.Tensor]) -> list[str]:
    """How each tensor is placed on the chips."""
    return _XLAC._get_xla_sharding_specs(list(tensors))


def keep_buffers(values: Sequence[torch.Tensor]) -> None:
    """Take back that a graph is given the buffers of its arguments."""
    for value in values:
        _XLAC._set_buffer_donation(value, False)


@_or_trace
def compile_graph(results: Sequence[torch.Tensor]) -> None:
    """Compile the graph of tensors, unless it is compiled already."""
    with alias_with_buffer_donor_config():
        _XLAC._xla_warm_up_cache(list(results), [])


def run_graph(handle: bytes, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a compiled graph, without waiting for it."""
    with pending.trace_nothing():
        return _XLAC._run_cached_graph(handle, arguments)


def replay_graph(handle: bytes, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As [`run_graph`], by its handle alone, which is counted."""
    results = run_graph(handle, arguments)
    _XLAC._xla_increment_counter(REPLAYS, 1)
    return results


def are_intact(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors still have their values, after a graph failed that may have been given their buffers. Reads one of them."""
    try:
        if tensors:
            _XLAC._xla_get_cpu_tensors([min(tensors, key=torch.Tensor.numel)])
    except RuntimeError:
        with suppress(RuntimeError):
            # What failed in the background is told at the next wait: here, and not in what is run next.
            xm.wait_device_ops()
        return False
    return True


def give_values(tensors: Iterable[torch.Tensor]) -> None:
    """
    Give tensors whose buffers are gone others: NaN, or 0. What ends the run may still compute with them, as the loop of layers does, which
    gives each layer its part back, and nothing that is still to be computed may hold on to what is gone.
    """
    for tensor in tensors:
        tensor.data = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)


def buffer_of(tensor: torch.Tensor) -> int | None:
    """Identity of the buffer of a tensor, or `None` where the buffer is gone: a program that failed was given it."""
    try:
        return _XLAC._get_tensors_handle([tensor])[0]
    except RuntimeError:
        return None
