"""Running a compiled program again by its handle: torch_xla's calls for it, all in this file."""

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

from .hosts import Hosts, HostsDisagree
from .program import CannotReplay, Program, Recording
from .xla_pending import pending


_XLAC = torch_xla._XLAC

#: torch_xla's counter of programs run by their handle alone.
REPLAYS = "ReplayedProgram"


def _buffers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Identities of the device buffers of tensors. Tensor ids will not do: a tensor with new data has the id of that."""
    return _XLAC._get_tensors_handle(list(tensors))


@contextmanager
def _uncollected() -> Iterator[None]:
    """
    Context that makes and drops a tensor for each result of a program. Hundreds of them have the garbage collector run two or
    three times a step, over everything there is, for nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class TracedStep:
    """What was traced in a recording."""

    #: Tensors that were computed and not run yet, and the place of each in the state.
    results: list[torch.Tensor]
    outputs: list[int]
    #: What the program is computed from, in the order of its arguments, and where that comes from: a place among state
    #: and data, or a tensor that stays as it is.
    values: list[torch.Tensor]
    inputs: list[int | torch.Tensor]
    #: For each of them, whether a result takes its place.
    updated: list[bool]
    #: For each result that was named besides the state, its place among state and data, or `None` where it is computed.
    made: list[int | None]


class XLARecording(Recording):
    """
    What is traced from now on, to be compiled once and run many times. A run reads the state and may change it.

    The calls are those of torch_xla's own bridge for dynamo (`torch_xla/_dynamo/dynamo_bridge.py`). There as here the
    program is compiled with the buffers of what it updates given to it.
    """

    def __init__(self, device: torch.device, state: Sequence[torch.Tensor], hosts: Hosts | None = None):
        self._device = device
        self._hosts = Hosts() if hosts is None else hosts
        self._why_not: str | None = None
        self._state = list(state)
        self._others: set[int] = set()
        self._made: list[torch.Tensor] = []
        self._seed = xm.get_rng_state()
        xm.wait_device_ops()
        # Held on to: the buffer of a tensor that is written before it is read is free, and its identity goes to the next.
        self._held: list[torch.Tensor] = []
        self._slots = {buffer: index for index, buffer in enumerate(self._hold(self._state))}
        # Of state and data together. The same data may stand in two of them.
        self._places = len(self._state)
        if len(self._slots) < self._places:
            raise CannotReplay("two tensors of the training state share a buffer")

    def add_data(self, tensors: Sequence[torch.Tensor]) -> None:
        for buffer in self._hold(tensors):
            self._others.discard(buffer)
            self._slots[buffer] = self._places
            self._places += 1

    def add_other(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note tensors that were sent meanwhile. A step that uses one which is not data cannot be run again."""
        self._others.update(self._hold(tensors))

    def add_results(self, tensors: Sequence[torch.Tensor]) -> None:
        tensors = list(tensors)
        if any(tensor.device.type != "xla" for tensor in tensors):
            self._why_not = "a result is on the host"
        elif len(set(map(_XLAC._xla_get_tensor_id, tensors))) < len(tensors):
            self._why_not = "two results are the same tensor"
        self._made = tensors

    def _hold(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        self._held += _XLAC._get_tensors_xla_device_data_node(list(tensors))[1]
        return _buffers(tensors)

    def finish(self, state: Sequence[torch.Tensor], aliased: Collection[int] = ()) -> "XLAProgram":
        traced = self._end_trace_together(state)
        for value, is_updated in zip(traced.values, traced.updated, strict=True):
            if is_updated:
                _XLAC._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            handle = _XLAC._get_graph_hash(traced.results)
            self._check_program(handle)
            program = XLAProgram(handle, traced.inputs, traced.outputs, traced.made)
            _XLAC._xla_warm_up_cache(traced.results, [])
        program.take([*state, *self._made], _XLAC._run_cached_graph(handle, traced.values), aliased)
        return program

    def _end_trace_together(self, state: Sequence[torch.Tensor]) -> TracedStep:
        """As [`~XLARecording.end_trace`], but where one host cannot replay the step, none does."""
        try:
            traced = self.end_trace(state)
        except CannotReplay as error:
            self._why_not = str(error)
        reasons = self._hosts.exchange("the end of a trace", self._why_not)
        if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
            raise CannotReplay(reason)
        return traced

    def _check_program(self, handle: bytes) -> None:
        handles = self._hosts.exchange("the program of a step", handle.hex())
        if len(set(handles)) > 1:
            raise HostsDisagree(
                "Hosts have traced different programs for the same step, which cannot run together. Something in the model or "
                "in user code goes by the host: its name, its clock, its random numbers or its files."
            )

    def end_trace(self, state: Sequence[torch.Tensor]) -> TracedStep:
        """Find what the trace depends on and what it makes. Raises `CannotReplay` if that is more than state and data."""
        if self._why_not is not None:
            raise CannotReplay(self._why_not)
        if xm.get_rng_state() != self._seed:
            raise CannotReplay(
                "a step draws random numbers by an operator that follows from no seed of this package (torch.rand, torch.randn, "
                "torch.randint, torch.bernoulli and dropout do)"
            )
        named = [*state, *self._made]
        pending = _XLAC._check_tensor_need_materialization(named)
        for before, after, is_pending in zip(self._state, state, pending[: len(state)], strict=True):
            if before is not after and not is_pending:
                raise CannotReplay("a tensor of the training state is replaced in the middle of a step")
        outputs = [index for index, is_pending in enumerate(pending) if is_pending]
        others = sum(_XLAC._check_device_tensor_need_materialization(str(self._device))) - len(outputs)
        if others:
            raise CannotReplay(
                f"{others} tensors are computed in a step that are not part of the training state, for example by a hook "
                "or a callback that keeps an activation"
            )
        results = [named[index] for index in outputs]
        _, values = _XLAC._get_tensors_xla_device_data_node(results)
        buffers = _buffers(values)
        if not self._others.isdisjoint(buffers):
            raise CannotReplay("a host-to-device transfer within a step")
        inputs = [self._slots.get(buffer, value) for value, buffer in zip(values, buffers, strict=True)]
        updated = [isinstance(slot, int) and slot < len(state) and pending[slot] for slot in inputs]
        return TracedStep(results, outputs, values, inputs, updated, self._find_places_of_made(pending[len(state) :]))

    def _find_places_of_made(self, pending: Sequence[bool]) -> list[int | None]:
        # Labels, for example, may be those of the batch.
        computed = [tensor for tensor, is_pending in zip(self._made, pending, strict=True) if not is_pending]
        places = iter(_buffers(computed))
        made = [None if is_pending else self._slots.get(next(places), -1) for is_pending in pending]
        if -1 in made:
            raise CannotReplay("a result does not depend on the batch")
        return made


@dataclass(frozen=True, eq=False)
class XLAProgram(Program):
    """A compiled program, and where its inputs come from. Inputs and outputs are as in [`TracedStep`]."""

    #: What torch_xla knows the compiled program by: a hash of everything in it.
    handle: bytes
    inputs: list[int | torch.Tensor]
    outputs: list[int]
    made: list[int | None]

    def take(
        self, state: Sequence[torch.Tensor], results: Sequence[torch.Tensor], aliased: Collection[int] = ()
    ) -> None:
        """
        Give the state its new values, or the first of its outputs. At places in `aliased` are tensors that share their
        memory with others.
        """
        for index, result in zip(self.outputs[: len(results)], results, strict=True):
            if index in aliased:
                # Slower, and those that share its memory follow.
                state[index].detach().copy_(result)
                continue
            # Not `_replace_xla_tensor`, which leaves the old value to tensors that are views of what `Module.to` made.
            state[index].data = result

    @cached_property
    def _own_inputs(self) -> list[torch.Tensor]:
        """Inputs that are neither state nor data, in the order of the arguments."""
        return [slot for slot in self.inputs if not isinstance(slot, int)]

    @cached_property
    def _pick(self) -> itemgetter:
        """Picks the arguments from those inputs, the state and the data, in C: there may be a thousand and more."""
        own = iter(range(len(self._own_inputs)))
        places = [slot + len(self._own_inputs) if isinstance(slot, int) else next(own) for slot in self.inputs]
        # It would give no tuple for a single one.
        return itemgetter(*places, 0)

    def run(
        self, state: Sequence[torch.Tensor], data: Sequence[torch.Tensor], aliased: Collection[int] = ()
    ) -> list[torch.Tensor]:
        own = self._own_inputs
        given = [*own, *state, *data]
        *arguments, _ = self._pick(given)
        with _uncollected():
            with pending.unchanged():
                results = _XLAC._run_cached_graph(self.handle, arguments)
            # Those of the state come first.
            of_state = len(results) - self.made.count(None)
            made = iter(results[of_state:])
            self.take(state, results[:of_state], aliased)
            del results
        _XLAC._xla_increment_counter(REPLAYS, 1)
        return [next(made) if place is None else given[len(own) + place] for place in self.made]

    def difference(self, other: "XLAProgram") -> str | None:
        if self.handle != other.handle:
            return "the graph has changed"
        if (self.outputs, self.made) != (other.outputs, other.made):
            return "the outputs of the graph have changed"
        for mine, theirs in zip(self.inputs, other.inputs, strict=True):
            if isinstance(mine, int) or isinstance(theirs, int):
                if mine is not theirs and mine != theirs:
                    return "the inputs of the graph have changed"
            elif _buffers([mine]) != _buffers([theirs]) and not torch.equal(mine.cpu(), theirs.cpu()):
                return "a constant of the graph has changed"
        return None
