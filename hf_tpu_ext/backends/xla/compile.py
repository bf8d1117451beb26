"""`compile` on torch_xla: a function is traced twice, compared, and then run by the handle of its graph."""

import gc
import os
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NoReturn

import torch
import torch_xla.core.xla_model as xm
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ...formatting import count
from ..base import Backend
from ..compiled_function import (
    DRAWS_ON_HOST,
    IN_A_BUFFER,
    REPLACES_STATE,
    SYNCS,
    Call,
    CannotReplay,
    CompiledFunction,
    StateLost,
)
from ..processes import HostsDisagree
from ..random_state import read_random_state
from . import graphs


# The place of a tensor in what a function returns.
_TENSOR = object()


@dataclass(frozen=True)
class Traced:
    """What was traced, and is not run yet."""

    #: Tensors to be computed, first those of the state, and the places of these in it.
    results: list[torch.Tensor]
    written_places: list[int]
    #: What they are computed from, in the order of the arguments, and where that comes from: a place among state and data, or a
    #: tensor that stays as it is.
    values: list[torch.Tensor]
    inputs: list[int | torch.Tensor]
    #: Of what the function returns: for each tensor a place among state and data, or `None` where it is computed; and the structure,
    #: with `_TENSOR` in the place of tensors.
    output_places: list[int | None]
    structure: Any

    @property
    def is_donated(self) -> list[bool]:
        """For each argument, whether its buffer is given to the program: a result takes its place."""
        written_places = set(self.written_places)
        return [isinstance(place, int) and place in written_places for place in self.inputs]

    @property
    def given_away(self) -> list[torch.Tensor]:
        """The arguments whose buffers are given to the program."""
        return list(compress(self.values, self.is_donated))


@dataclass(eq=False)
class Executable:
    """A compiled graph: where its arguments come from, and where its results go, as in [`Traced`]."""

    handle: bytes
    inputs: list[int | torch.Tensor]
    written_places: list[int]
    output_places: list[int | None]
    structure: Any
    #: Graphs compiled so far when it was run last.
    compiles: int
    #: Whether it is like the trace before it.
    is_checked: bool = False
    #: Whether it, or an earlier one in its place, was unlike the trace before it.
    was_unlike: bool = False

    @property
    def _places(self) -> list[int | None]:
        """Of each argument the place among state and data, `None` where it is a constant."""
        return [place if isinstance(place, int) else None for place in self.inputs]

    @property
    def _constants(self) -> list[torch.Tensor]:
        return [place for place in self.inputs if not isinstance(place, int)]

    def is_kept(self, compiles: int) -> bool:
        """Whether torch_xla still has it, where so many graphs were compiled: it drops the one that was not used for longest."""
        return compiles - self.compiles < int(os.environ.get("XLA_COMPILATION_CACHE_SIZE", 2048))

    def run(self, tensors: Sequence[torch.Tensor], aliases: Collection[int]) -> Any:
        """Run it with the `tensors` of state and data. Those at places in `aliases` share their memory with others."""
        arguments = [tensors[place] if isinstance(place, int) else place for place in self.inputs]
        # A tensor is made and dropped for each result: hundreds of them have the garbage collector run two or three times a step, over
        # everything there is, for nothing.
        collects = gc.isenabled()
        gc.disable()
        try:
            results = iter(graphs.replay_graph(self.handle, arguments))
            self.take(results, tensors, aliases)
            return self.fill(next(results) if place is None else tensors[place] for place in self.output_places)
        finally:
            if collects:
                gc.enable()

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        """What the function returns, with these tensors."""
        tensors = iter(tensors)
        return tree_map(lambda leaf: next(tensors) if leaf is _TENSOR else leaf, self.structure)

    def take(self, results: Iterator[torch.Tensor], tensors: Sequence[torch.Tensor], aliases: Collection[int]) -> None:
        """Give the state its new values, which are the first results."""
        for place in self.written_places:
            result = next(results)
            if place in aliases:
                # Slower, and those that share its memory follow.
                tensors[place].detach().copy_(result)
            else:
                # Not `_replace_xla_tensor`, which leaves the old value to tensors that are views of what `Module.to` made.
                tensors[place].data = result

    def difference(self, other: "Executable") -> str | None:
        """How another trace of the same function differs, as a clause; `None` if it does not matter."""
        if self.handle != other.handle:
            return f"the graph has changed{IN_A_BUFFER}"
        if (self.written_places, self.output_places, self.structure) != (
            other.written_places,
            other.output_places,
            other.structure,
        ):
            return "the results of the graph have changed"
        mine, theirs = self._constants, other._constants
        if self._places != other._places:
            return "the arguments of the graph have changed"
        buffers = zip(graphs.identify_buffers(mine), graphs.identify_buffers(theirs), strict=True)
        for (buffer, other_buffer), value, other_value in zip(buffers, mine, theirs, strict=True):
            if buffer != other_buffer and not torch.equal(value.cpu(), other_value.cpu()):
                return f"a constant of the graph has changed{IN_A_BUFFER}"
        return None


class Trace:
    """
    What is traced from now on with a state and data, until it ends. The calls are in the order of torch_xla's own bridge for dynamo
    (`torch_xla/_dynamo/dynamo_bridge.py`).
    """

    def __init__(self, backend: Backend, state: Sequence[torch.Tensor], data: Sequence[torch.Tensor]):
        self._backend, self._state = backend, list(state)
        if any(tensor.device.type != backend.device.type for tensor in state):
            raise CannotReplay(
                "a tensor of the training state is on the host, for example a buffer that the model got after the trainer was made: "
                "register it with device=model.device"
            )
        # A buffer that is still to be filled has no identity.
        xm.wait_device_ops()
        # Held on to: the buffer of a tensor that is written before it is read is free, and its identity goes to the next.
        self._held_tensors = graphs.hold_buffers([*state, *data])
        self._buffers = graphs.identify_buffers([*state, *data])
        self._places = {buffer: place for place, buffer in enumerate(self._buffers)}
        # The same data may stand in two of them.
        if len(set(self._buffers[: len(self._state)])) < len(self._state):
            raise CannotReplay("two tensors of the training state share a buffer")
        self._sent_buffers: set[int] = set()
        self._before = read_random_state(), xm.get_rng_state(), backend.insight.counters()
        graphs.pending.begin_trace(self)

    def note_sent(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note tensors that were sent to the device meanwhile."""
        self._held_tensors += graphs.hold_buffers(tensors)
        self._sent_buffers.update(graphs.identify_buffers(tensors))

    def undo(self) -> None:
        """Give the state the values that it had before, where the trace has failed."""
        by_buffer = {graphs.buffer_of(tensor): tensor for tensor in self._held_tensors}
        for tensor, buffer in zip(self._state, self._buffers, strict=False):
            if buffer in by_buffer:
                tensor.data = by_buffer[buffer]

    def drop(self, graph: Traced) -> None:
        """Forget what was traced."""
        graphs.give_values(graph.results)
        self.undo()

    def why_traced(self, draws_on_host: bool) -> str | None:
        """What the trace did that a program run by its handle would not do."""
        random_state, seed, before = self._before
        now = self._backend.insight.counters()
        if now.fallbacks > before.fallbacks:
            return "CPU fallback of an operator in the step"
        if now.reads > before.reads:
            return SYNCS
        if not draws_on_host and read_random_state() != random_state:
            return DRAWS_ON_HOST
        if xm.get_rng_state() != seed:
            return (
                "a step draws random numbers by an operator that follows from no seed of this package (torch.rand, torch.randn, "
                "torch.randint, torch.bernoulli and dropout do)"
            )
        return None

    def end(self, state: Sequence[torch.Tensor], output: Any) -> Traced:
        """
        Find what was traced: the state is the same tensors, changed in place, or others in their place, and `output` is what the
        function returns. Raises `CannotReplay` if that depends on more than state and data, or is more than these results.
        """
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if any(leaf.device.type != self._backend.device.type for leaf in leaves):
            raise CannotReplay("a result is on the host")
        tensors, size = [*state, *leaves], len(self._state)
        if len(state) != size:
            raise CannotReplay(
                "the training state has got tensors in the middle of a step, for example the sums of a metric that _more_metrics() of the "
                "trainer does not name"
            )
        is_computed = graphs.find_pending(tensors)
        for before, after, is_pending in zip(self._state, state, is_computed[:size], strict=True):
            if before is not after and not is_pending:
                raise CannotReplay(REPLACES_STATE)
        others = graphs.count_pending(self._backend.device) - sum(is_computed)
        if others:
            raise CannotReplay(
                f"{count(others, 'tensor')} of a step {'is' if others == 1 else 'are'} not part of the training state, for example one that "
                "a hook, a callback or an attribute of the trainer keeps: a buffer of the model can keep it"
            )
        places = list(compress(range(len(tensors)), is_computed))
        old_buffers = [self._buffers[place] if place < size else None for place in places]
        order, values, buffers = graphs.sort_results([tensors[place] for place in places], old_buffers)
        if not self._sent_buffers.isdisjoint(buffers):
            raise CannotReplay(f"a host-to-device transfer within a step{IN_A_BUFFER}")
        inputs = [self._places.get(buffer, value) for value, buffer in zip(values, buffers, strict=True)]
        results = [tensors[places[index]] for index in order]
        written_places = [places[index] for index in order if places[index] < size]
        structure = tree_map_only(torch.Tensor, lambda _: _TENSOR, output)
        return Traced(results, written_places, values, inputs, self._places_of(leaves, is_computed[size:]), structure)

    def _places_of(self, leaves: Sequence[torch.Tensor], is_computed: Sequence[bool]) -> list[int | None]:
        # Labels, for example, may be those of the batch.
        own_buffers = iter(
            graphs.identify_buffers(list(compress(leaves, [not is_pending for is_pending in is_computed])))
        )
        places = [None if is_pending else self._places.get(next(own_buffers), -1) for is_pending in is_computed]
        if -1 in places:
            raise CannotReplay("a result does not depend on the batch")
        return places


class XLACompiledFunction(CompiledFunction):
    """
    A function on torch_xla. The second call of a kind and shape is traced, too, and compared: the same program, over the same
    tensors, with the same constants; if it is not, so is the third.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._aliases: set[int] = set()
        self._placements: tuple[str, ...] = ()

    def _run_program(self, key: Hashable, state: list[torch.Tensor], call: Call) -> Any:
        compiles = self._backend.compiles()
        key = (self._follow_placements(state), *key)
        program = self._programs.get(key)
        if program is None or not program.is_checked or not program.is_kept(compiles):
            return self._trace(key, program, state, call)
        try:
            results = program.run([*state, *call.tensors], self._find_aliases(state))
        except (AttributeError, TypeError, RuntimeError) as error:
            self._raise_after(error, program, state)
        self.replays, program.compiles = True, compiles
        return results

    # ---- What has changed ----

    def _follow_placements(self, state: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """How the state is placed on the chips. A buffer of another part may have the size of the one before."""
        if self._backend.num_chips > 1:
            placements = tuple(graphs.read_placements(state))
            if placements != self._placements and self._programs:
                self.change = "weights or moments are placed otherwise on the chips"
            self._placements = placements
        return self._placements

    def _find_aliases(self, state: Sequence[torch.Tensor]) -> set[int]:
        """Tensors of the state that somebody has a view of. Asked anew only where there may be more or fewer."""
        if self._aliases or self._copies.has_aliases:
            self._aliases, self._copies.has_aliases = self._backend.programs.find_aliases(state), False
        return self._aliases

    # ---- Tracing ----

    def _trace(self, key: Hashable, earlier: Executable | None, state: list[torch.Tensor], call: Call) -> Any:
        """Trace the function, and run its program for the first or the second time."""
        trace, graph, reason = None, None, None
        try:
            trace = self._backend.programs.begin_trace(state, call.tensors)
        except CannotReplay as error:
            reason = str(error)
        try:
            with self._fingerprint.trace():
                output = self._function(call.data, **call.static_args)
        except BaseException:
            if trace is not None:
                trace.undo()
            raise
        # The function has run code that may keep some.
        self._copies.has_aliases = True
        try:
            reason = reason or self._fingerprint.code or trace.why_traced(self._draws_on_host)
            if reason is None:
                # A view would hold on to what it is a view of.
                output = tree_map_only(torch.Tensor, self._without_base, output)
                state = self._state()
                graph = trace.end(state, output)
        except CannotReplay as error:
            reason = str(error)
        try:
            if (reason := self._agree("the end of a trace", reason)) is not None:
                raise CannotReplay(reason)
            call.end(execute=partial(self._run_first, key, earlier, graph, state, call.tensors))
        except StateLost:
            trace.drop(graph)
            raise
        except CannotReplay as error:
            self.refuse(str(error))
            call.end(execute=self._backend.end_step)
        return output

    def _without_base(self, tensor: torch.Tensor) -> torch.Tensor:
        is_view = tensor.device.type == self._backend.device.type and any(graphs.find_pending([tensor]))
        return tensor.clone() if is_view else tensor

    def _run_first(
        self,
        key: Hashable,
        earlier: Executable | None,
        graph: Traced,
        state: list[torch.Tensor],
        data: list[torch.Tensor],
    ) -> Any:
        """Compile what was traced, unless it is compiled already, and run it. Raises `CannotReplay` where nothing has run."""
        programs = self._backend.programs
        executable = programs.hash_traced(graph)
        self._note(key, earlier, executable)
        try:
            module = programs.run_first(executable, graph, [*state, *data], self._find_aliases(state))
        except CannotReplay:
            graphs.keep_buffers(graph.given_away)
            raise
        except RuntimeError as error:
            self._raise_after(error, executable, state)
        executable.compiles = self._backend.compiles()
        return module

    def _note(self, key: Hashable, earlier: Executable | None, executable: Executable) -> None:
        """Compare a program with what was traced before."""
        difference = None if earlier is None else executable.difference(earlier)
        of_hosts = self._backend.processes.exchange("the program of a step", [executable.handle.hex(), difference])
        if len({handle for handle, _ in of_hosts}) > 1:
            raise HostsDisagree(
                "Hosts have traced different programs for the same step, which cannot run together. Something in the model or "
                "in user code goes by the host: its name, its clock, its random numbers or its files."
            )
        difference = next((reason for _, reason in of_hosts if reason is not None), None)
        was_unlike = earlier is not None and earlier.was_unlike
        if difference is not None and was_unlike:
            # This one runs as any other.
            self.refuse(difference)
            return
        # Once that is no reason: the first step of a run may be another program, which does the same with one operator less.
        executable.was_unlike = difference is not None or was_unlike
        executable.is_checked = earlier is not None and difference is None
        self._programs[key] = executable

    def _raise_after(self, error: Exception, executable: Executable, state: Sequence[torch.Tensor]) -> NoReturn:
        """Raise `CannotReplay` for a program that failed where the state still has its values, else `StateLost`."""
        what = f"{type(error).__name__}: {error}"
        written = [state[place] for place in executable.written_places]
        if not graphs.are_intact(written):
            graphs.give_values(written)
            raise StateLost(
                f"A compiled step failed after it was given the buffers of the weights, whose values are gone. {what}"
            ) from error
        raise CannotReplay(
            f"a compiled graph could not be run ({what.splitlines()[0]}); please report this line"
        ) from error
