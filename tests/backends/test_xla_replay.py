"""A program that is recorded once and run by its handle."""

import copy
import gc

import pytest
import torch
import torch_xla

from hf_tpu_ext.backends.program import CannotReplay
from hf_tpu_ext.step.random_numbers import RandomNumbers


def record(backend, trace, state, data):
    backend.flush()
    recording = backend.programs.record(state)
    recording.add_data(data)
    trace(*state, *data)
    return recording.finish(state)


def accumulate(total, number):
    total.copy_(total * 2 + number)


@pytest.fixture
def total(xla):
    return xla.send(torch.zeros(3))


def test_runs_with_new_data_and_the_current_state(xla, total):
    expected = torch.zeros(3)
    program = record(xla, accumulate, [total], [xla.send(torch.full((3,), 1.0))])
    accumulate(expected, torch.full((3,), 1.0))
    xla.wait()
    before = xla.counters()
    for value in (5.0, 0.0, -1.0):
        program.run([total], [xla.send(torch.full((3,), value))])
        accumulate(expected, torch.full((3,), value))
        assert torch.equal(xla.fetch(total), expected)
    spent = xla.counters() - before
    assert (spent.compiles, spent.executions, spent.replays) == (0, 3, 3)


def test_state_that_is_written_before_it_is_read_is_not_taken_for_a_constant(xla):
    """The buffers are free while the step is recorded, and the next numbers get their identity."""

    def trace(*tensors):
        *written, total, number = tensors
        for index, tensor in enumerate(written):
            tensor.copy_(number * (3.3 + index))
        for scalar in range(100):
            total.copy_(total + number * (0.37 + scalar))

    *written, total = xla.send([torch.zeros(()) for _ in range(101)])
    program = record(xla, trace, [*written, total], [xla.send(torch.tensor(1.0))])
    step = sum(0.37 + scalar for scalar in range(100))
    for turn in (2, 3, 4):
        program.run([*written, total], [xla.send(torch.tensor(1.0))])
        assert xla.fetch(written[7]).item() == pytest.approx(10.3)
        assert xla.fetch(total).item() == pytest.approx(turn * step, rel=1e-4)


def test_a_view_of_the_state_has_the_new_value(xla):
    """`Module.to` leaves parameters as views, and reads go through `detach`."""
    layer = xla.place(torch.nn.Linear(3, 3, bias=False))
    xla.wait()

    def double(weight, number):
        with torch.no_grad():
            weight.copy_(weight * number)

    expected = layer.weight.detach().cpu()
    program = record(xla, double, [layer.weight], [xla.send(torch.tensor(2.0))])
    program.run([layer.weight], [xla.send(torch.tensor(3.0))])
    assert torch.equal(xla.fetch(layer.weight.detach()), expected * 6)
    assert torch.equal(layer.state_dict()["weight"].cpu(), expected * 6)


def test_buffers_of_the_state_are_given_to_the_program(xla, total):
    program = record(xla, accumulate, [total], [xla.send(torch.ones(3))])
    old = torch.empty(0, device=total.device)
    old.data = total.data
    xla.wait()
    number = xla.send(torch.ones(3))
    program.run([total], [number])
    xla.fetch(total)
    with pytest.raises(RuntimeError, match="[Dd]eleted|donated"):
        (old + 1).cpu()
    assert torch.equal(xla.fetch(number), torch.ones(3))


def test_random_numbers_follow_from_data(xla, total):
    def drop(total, number):
        with RandomNumbers(number):
            total.copy_(total + torch.rand(3, device=total.device) + torch.nn.functional.dropout(total, 0.5))

    seeds = [torch.tensor(seed, dtype=torch.int32) for seed in (5, 7, 5, 0)]
    traced = []
    for seed in seeds:
        drop(total, xla.send(seed))
        xla.end_step()
        traced.append(xla.fetch(total))
    total = xla.send(torch.zeros(3))
    program = record(xla, drop, [total], [xla.send(seeds[0])])
    for step, seed in enumerate(seeds):
        if step:
            program.run([total], [xla.send(seed)])
        assert torch.equal(xla.fetch(total), traced[step])


def test_numbers_of_the_devices_own_generator_are_not_replayed(xla, total):
    def draw(total, number):
        total.copy_(total + torch.rand(3, device=total.device) * number)

    with pytest.raises(CannotReplay, match="draws random numbers by an operator that follows from no seed"):
        record(xla, draw, [total], [xla.send(torch.tensor(1.0))])


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (accumulate, None),
        (lambda total, number: total.copy_(total * 3 + number), "a constant of the graph has changed"),
        (lambda total, number: total.copy_(total + number), "the graph has changed"),
    ],
    ids=["same", "number", "program"],
)
def test_two_recordings_are_compared(xla, total, second, says):
    number = xla.send(torch.ones(3))
    first = record(xla, accumulate, [total], [number])
    assert first.difference(record(xla, second, [total], [number])) == says


def test_what_cannot_be_run_again_is_refused_before_it_runs(xla, total):
    kept = []

    def keep(total, number):
        accumulate(total, number)
        kept.append(total * 3)

    with pytest.raises(CannotReplay, match="1 tensors are computed"):
        record(xla, keep, [total], [xla.send(torch.ones(3))])
    xla.end_step()
    assert torch.equal(xla.fetch(kept[0]), torch.full((3,), 3.0))

    with pytest.raises(CannotReplay, match="host-to-device transfer"):
        record(xla, lambda total, _: accumulate(total, xla.send(torch.ones(3))), [total], [xla.send(torch.ones(3))])
    xla.end_step()
    assert torch.equal(xla.fetch(total), torch.full((3,), 3.0))

    with pytest.raises(CannotReplay, match="share a buffer"):
        xla.programs.record([total, total])


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([-0.0, float("inf"), -3.5]),
        torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
        torch.tensor([2**62 + 1, -5]),
        torch.tensor([True, False]),
        torch.tensor(0.0),
    ],
    ids=lambda values: str(values.dtype),
)
def test_copies_have_buffers_of_their_own(xla, values):
    """So they outlive the buffer that a program is given, and have the same bits."""
    tensor = xla.send(values.clone())
    lazy = tensor.clone()
    with torch.inference_mode():
        inferred = tensor.clone()
    xla.programs.separate_copies([tensor])
    with xla.programs.real_copies() as copies:
        cloned, deep, filled = tensor.clone(), copy.deepcopy(tensor), torch.empty_like(tensor).copy_(tensor)
        with copies.suspended():
            shared = tensor.clone()
    assert torch_xla._XLAC._get_tensors_handle([shared]) == torch_xla._XLAC._get_tensors_handle([tensor])
    xla.flush()
    buffers = torch_xla._XLAC._get_tensors_handle([tensor, lazy, inferred, cloned, deep, filled])
    assert len(set(buffers)) == 6
    for made in (lazy, inferred, cloned, deep, filled):
        assert made.dtype == values.dtype and torch.equal(made.cpu(), values)
    assert not xla.programs.aliased([tensor])
    held = tensor.detach()
    assert xla.programs.aliased([tensor, cloned]) == {0} and held is not None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_many_tensors_of_a_run_are_no_reason_to_collect_garbage(xla, enabled):
    state = list(xla.send([torch.zeros(2) for _ in range(50)]))
    number = xla.send(torch.ones(()))
    program = record(xla, lambda *tensors: [tensor.add_(tensors[-1]) for tensor in tensors[:-1]], state, [number])
    xla.wait()
    threshold = gc.get_threshold()
    collections = []
    gc.callbacks.append(note := lambda phase, info: collections.append(phase))
    gc.collect()
    try:
        gc.set_threshold(40)
        gc.enable() if enabled else gc.disable()
        collections.clear()
        program.run(state, [number])
        assert collections == []
        assert gc.isenabled() is enabled
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
        gc.callbacks.remove(note)
    assert [value.tolist() for value in xla.fetch(state)] == [[2.0, 2.0]] * 50
