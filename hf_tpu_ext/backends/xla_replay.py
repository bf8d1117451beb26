"""Running a compiled program again by its handle: torch_xla's calls for it, all in this file."""

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

# What torch_xla does to the seed at each random operator (`GetRngSeed` in `torch_xla/csrc/xla_graph_executor.cpp`).
_SEED_MULTIPLIER, _SEED_INCREMENT, _SEED_MODULUS = 214013, 2531011, 2**64
_MOST_DRAWS = 100_000


def _buffers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Identities of the device buffers of tensors. Tensor ids will not do: a tensor with new data has the id of that."""
    return _XLAC._get_tensors_handle(list(tensors))


def _after_draws(seed: int, draws: int) -> int:
    for _ in range(draws):
        seed = (_SEED_INCREMENT + _SEED_MULTIPLIER * seed) % _SEED_MODULUS
    return seed


def _count_draws(before: int, after: int) -> int:
    """Random operators between two seeds."""
    seed = before
    for draws in range(_MOST_DRAWS):
        if seed == after:
            return draws
        seed = _after_draws(seed, 1)
    raise CannotReplay("the random number generator was set to another seed in the middle of a step")


def _is_seed(tensor_id: int) -> bool:
    return tensor_id == _XLAC._get_seed_info_id()


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
class _Seed:
    """
    A seed that a program starts from: that of the step after so many random operators. Where a loop has drawn from it,
    torch_xla no longer marks it as one, and it is known by its value alone.
    """

    draws: int
    marked: bool = True
    #: What it was when it was not marked.
    value: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TracedStep:
    """What was traced in a recording."""

    #: Tensors that were computed and not run yet, and the place of each in the state.
    results: list[torch.Tensor]
    outputs: list[int]
    #: What the program is computed from, in the order of its arguments, and where that comes from: a place among state
    #: and data, a tensor that stays as it is, or a seed.
    values: list[torch.Tensor]
    inputs: list[int | torch.Tensor | _Seed]
    #: For each of them, whether a result takes its place.
    updated: list[bool]
    #: For each result that was named besides the state, its place among state and data, or `None` where it is computed.
    made: list[int | None]
    #: Random operators in the program, and the state of the random number generator after them.
    draws: int
    seed_after: int


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

    def finish(
        self, state: Sequence[torch.Tensor], like: "XLAProgram | None" = None, aliased: Collection[int] = ()
    ) -> "XLAProgram":
        traced = self._end_trace_together(state, like)
        for value, is_updated in zip(traced.values, traced.updated, strict=True):
            if is_updated:
                _XLAC._set_buffer_donation(value, True)
        with alias_with_buffer_donor_config():
            handle = _XLAC._get_graph_hash(traced.results)
            self._check_program(handle)
            program = XLAProgram(self._device, handle, traced.inputs, traced.outputs, traced.made, traced.draws)
            _XLAC._xla_warm_up_cache(traced.results, [])
        program.take([*state, *self._made], _XLAC._run_cached_graph(handle, traced.values), aliased)
        xm.set_rng_state(traced.seed_after)
        return program

    def _end_trace_together(self, state: Sequence[torch.Tensor], like: "XLAProgram | None") -> TracedStep:
        """As [`~XLARecording.end_trace`], but where one host cannot replay the step, none does."""
        try:
            traced = self.end_trace(state, like)
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

    def end_trace(self, state: Sequence[torch.Tensor], like: "XLAProgram | None" = None) -> TracedStep:
        """
        Find what the trace depends on and what it makes. Raises `CannotReplay` if that is more than state and data.
        `like` is an earlier program that this one should be.
        """
        if self._why_not is not None:
            raise CannotReplay(self._why_not)
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
        ids, values = _XLAC._get_tensors_xla_device_data_node(results)
        seeds = [value for tensor_id, value in zip(ids, values, strict=True) if _is_seed(tensor_id)]
        draws_before = iter(self._draws_before(seeds, [] if like is None else like.seeds))
        after = xm.get_rng_state()
        draws = _count_draws(self._seed, after)
        buffers = _buffers(values)
        unmarked = self._find_unmarked_seeds(ids, values, buffers, draws, like)
        inputs: list[int | torch.Tensor | _Seed] = []
        for place, (tensor_id, value, buffer) in enumerate(zip(ids, values, buffers, strict=True)):
            if _is_seed(tensor_id):
                inputs.append(_Seed(next(draws_before)))
            elif place in unmarked:
                inputs.append(unmarked[place])
            elif buffer in self._others:
                raise CannotReplay("a host-to-device transfer within a step")
            else:
                inputs.append(self._slots.get(buffer, value))
        updated = [isinstance(slot, int) and slot < len(state) and pending[slot] for slot in inputs]
        made = self._find_places_of_made(pending[len(state) :])
        return TracedStep(results, outputs, values, inputs, updated, made, draws, after)

    def _find_places_of_made(self, pending: Sequence[bool]) -> list[int | None]:
        # Labels, for example, may be those of the batch.
        computed = [tensor for tensor, is_pending in zip(self._made, pending, strict=True) if not is_pending]
        places = iter(_buffers(computed))
        made = [None if is_pending else self._slots.get(next(places), -1) for is_pending in pending]
        if -1 in made:
            raise CannotReplay("a result does not depend on the batch")
        return made

    def _find_unmarked_seeds(
        self, ids: list[int], values: list[torch.Tensor], buffers: list[int], draws: int, like: "XLAProgram | None"
    ) -> dict[int, _Seed]:
        """
        Seeds that are known by their value, by the place of the argument. Read anew in each recording: a constant may have the
        value of a seed once, and not twice.
        """
        if not draws:
            return {}
        places = [
            place
            for place, (tensor_id, value, buffer) in enumerate(zip(ids, values, buffers, strict=True))
            if value.dtype == torch.int64
            and not value.ndim
            and not _is_seed(tensor_id)
            and buffer not in self._slots
            and (like is None or place in like.unmarked_seeds)
        ]
        if not places:
            return {}
        drawn, seed = {}, self._seed
        for count in range(draws + 1):
            drawn[seed], seed = count, _after_draws(seed, 1)
        found = [value.item() for value in _XLAC._xla_get_cpu_tensors([values[i] for i in places])]
        return {
            place: _Seed(drawn[seed % _SEED_MODULUS], marked=False, value=seed)
            for place, seed in zip(places, found, strict=True)
            if seed % _SEED_MODULUS in drawn
        }

    def _draws_before(self, seeds: list[torch.Tensor], known: list[int]) -> list[int]:
        """For each seed that the program starts from, the random operators between the beginning of the step and it."""
        if len(seeds) < 2:
            return [0] * len(seeds)
        if len(seeds) == len(known):
            return known
        # Layers that are computed once more in the backward pass draw from where they drew before.
        return [_count_draws(self._seed, seed.item() % _SEED_MODULUS) for seed in _XLAC._xla_get_cpu_tensors(seeds)]


@dataclass(frozen=True, eq=False)
class XLAProgram(Program):
    """A compiled program, and where its inputs come from. Inputs, outputs and draws are as in [`TracedStep`]."""

    device: torch.device
    #: What torch_xla knows the compiled program by: a hash of everything in it.
    handle: bytes
    inputs: list[int | torch.Tensor | _Seed]
    outputs: list[int]
    made: list[int | None]
    draws: int

    @property
    def seeds(self) -> list[int]:
        """For each seed that the program starts from, the random operators between the beginning of the step and it."""
        return [slot.draws for slot in self.inputs if isinstance(slot, _Seed) and slot.marked]

    @property
    def unmarked_seeds(self) -> set[int]:
        """Places of seeds that are known by their value alone."""
        return {place for place, slot in enumerate(self.inputs) if isinstance(slot, _Seed) and not slot.marked}

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
    def _own_inputs(self) -> list[torch.Tensor | _Seed]:
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
        seed = xm.get_rng_state()
        own = []
        for value in self._own_inputs:
            if isinstance(value, _Seed):
                xm.set_rng_state(_after_draws(seed, value.draws))
                value = _XLAC._get_base_seed_as_tensor(str(self.device))
            own.append(value)
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
        xm.set_rng_state(_after_draws(seed, self.draws))
        return [next(made) if place is None else given[len(own) + place] for place in self.made]

    def difference(self, other: "XLAProgram") -> str | None:
        if self.handle != other.handle:
            return "the graph has changed"
        if (self.outputs, self.made) != (other.outputs, other.made):
            return "the outputs of the graph have changed"
        for mine, theirs in zip(self.inputs, other.inputs, strict=True):
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                if _buffers([mine]) != _buffers([theirs]) and not torch.equal(mine.cpu(), theirs.cpu()):
                    return "a constant of the graph has changed"
            elif isinstance(mine, torch.Tensor):
                if not _is_same_number(mine, theirs):
                    return "the inputs of the graph have changed"
            elif isinstance(theirs, torch.Tensor) or mine != theirs:
                return "the inputs of the graph have changed"
        return None


def _is_same_number(number: torch.Tensor, before: "int | torch.Tensor | _Seed") -> bool:
    """Whether a constant was taken for a seed before, whose value it had by chance: `seed=48`, and 48 positions."""
    return isinstance(before, _Seed) and not before.marked and number.item() == before.value
