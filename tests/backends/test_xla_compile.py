"""A function that is traced twice, compared, and then run by the handle of its graph."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch_xla

from hf_tpu_ext.backends.compiled_function import StateLost
from hf_tpu_ext.backends.xla.compile import Executable
from hf_tpu_ext.layers.random_numbers import RandomNumbers


class Unchanged:
    """A fingerprint that changes when it is told to."""

    tensors = []

    def __init__(self):
        self.changed = self.reason = self.code = None
        self.noted = 0

    def trace(self):
        return nullcontext()

    def note(self):
        self.changed, self.noted = None, self.noted + 1

    def change(self):
        return self.changed

    def why_not(self):
        return self.reason


class Calls:
    """Calls a function of a state and of a number, compiled, and notes why calls are traced."""

    def __init__(self, xla, function, state, **settings):
        self.backend, self.state, self.said, self.fingerprint = xla, state, [], Unchanged()
        self.compiled = xla.programs.compile(
            lambda data, **fixed: function(*self.state, data["number"], **fixed),
            lambda: self.state,
            self.fingerprint,
            xla.programs.real_copies(),
            warn=self.said.append,
            **settings,
        )

    def __call__(self, number, **fixed):
        number = number if isinstance(number, torch.Tensor) else torch.full((3,), float(number))
        return self.compiled({"number": self.backend.send(number)}, lambda execute: execute(), **fixed)


def accumulate(total, number):
    total.copy_(total * 2 + number)


@pytest.fixture
def total(xla):
    return xla.send(torch.zeros(3))


def test_a_number_in_the_place_of_a_constant_is_a_difference(xla):
    ones = [Executable(b"", [each], [], [], None, 0) for each in (0, torch.ones(2, device=xla.device))]
    assert ones[0].difference(ones[1]) == ones[1].difference(ones[0]) == "the arguments of the graph have changed"
    assert ones[0].difference(ones[0]) is None


def test_the_third_call_runs_with_new_data_and_the_current_state(xla, total):
    call, expected = Calls(xla, accumulate, [total]), torch.zeros(3)
    for turn, value in enumerate((1.0, 5.0, 0.0, -1.0, 7.0)):
        xla.wait()
        before = xla.counters()
        call(value)
        accumulate(expected, torch.full((3,), value))
        assert call.compiled.replays == (turn > 1)
        assert torch.equal(xla.fetch(total), expected)
        spent = xla.counters() - before
        assert (spent.executions, spent.replays) == (1, turn > 1) and (spent.compiles == 0 or not turn)
    assert call.said == []


def test_each_result_takes_the_memory_of_what_it_replaces(xla):
    # The compiler pairs arguments and results of a size in their order, whatever their shapes are.
    def step(wide, tall, flat, moment, number):
        update = (wide @ tall @ flat.view(2, 3)).sum() * number.sum()
        for tensor in (wide, tall, flat):
            tensor.sub_(update)
        moment.add_(wide)

    state = [xla.send(torch.ones(shape)) for shape in ((2, 3), (3, 2), (6,), (2, 3))]
    call = Calls(xla, step, state)
    for _ in range(3):
        call(0.5)
    assert call.compiled.replays
    (known,) = call.compiled._programs.values()
    assert [place for place in known.inputs if place in known.written_places] == known.written_places
    assert sorted(known.written_places) == [0, 1, 2, 3]


def test_what_is_fixed_selects_a_program(xla, total):
    def add(total, number, closing):
        total.copy_(total * 10 + number if closing else total + number)
        return {"sum": total.sum(), "none": None} if closing else {}

    call, expected = Calls(xla, add, [total]), torch.zeros(3)
    for turn in range(4):
        for closing in (False, True):
            results = call(turn, closing=closing)
            expected = expected * 10 + turn if closing else expected + turn
            assert call.compiled.replays == (turn > 1)
            assert results == {} or (results["none"], results["sum"].item()) == (None, expected.sum().item())
    assert torch.equal(xla.fetch(total), expected)


def test_results_are_computed_or_those_of_the_data(xla, total):
    def both(total, number):
        return number * 2, number, (number * 2).view(3, 1)

    call = Calls(xla, both, [total])
    for value in (1.0, 2.0, 3.0, 4.0):
        double, same, view = xla.fetch(call(value))
        assert (
            double.tolist() == [2 * value] * 3 and same.tolist() == [value] * 3 and view.tolist() == [[2 * value]] * 3
        )
    assert call.compiled.replays and call.said == []


def test_state_that_is_written_before_it_is_read_is_not_taken_for_a_constant(xla):
    """The buffers are free while the step is traced, and the next numbers get their identity."""

    def trace(*tensors):
        *written, total, number = tensors
        for index, tensor in enumerate(written):
            tensor.copy_(number[0] * (3.3 + index))
        for scalar in range(100):
            total.copy_(total + number[0] * (0.37 + scalar))

    *written, total = xla.send([torch.zeros(()) for _ in range(101)])
    call = Calls(xla, trace, [*written, total])
    step = sum(0.37 + scalar for scalar in range(100))
    for turn in (1, 2, 3, 4):
        call(1.0)
        assert xla.fetch(written[7]).item() == pytest.approx(10.3)
        assert xla.fetch(total).item() == pytest.approx(turn * step, rel=1e-4)
    assert call.compiled.replays


def test_a_view_of_the_state_has_the_new_value(xla):
    """`Module.to` leaves parameters as views, and reads go through `detach`."""
    layer = xla.place(torch.nn.Linear(3, 3, bias=False))
    xla.wait()

    def scale(weight, number):
        with torch.no_grad():
            weight.copy_(weight * number)

    expected = layer.weight.detach().cpu()
    call = Calls(xla, scale, [layer.weight])
    for _ in range(3):
        call(2.0)
    assert call.compiled.replays
    assert torch.equal(xla.fetch(layer.weight.detach()), expected * 8)
    assert torch.equal(layer.state_dict()["weight"].cpu(), expected * 8)


def test_buffers_of_the_state_are_given_to_the_program(xla, total):
    call = Calls(xla, accumulate, [total])
    call(1.0), call(1.0)
    old = torch.empty(0, device=total.device)
    old.data = total.data
    xla.wait()
    number = xla.send(torch.ones(3))
    call(number)
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
    call = Calls(xla, drop, [xla.send(torch.zeros(3))])
    for seed, expected in zip(seeds, traced, strict=True):
        call(seed)
        assert torch.equal(xla.fetch(call.state[0]), expected)
    assert call.compiled.replays


# ---- What cannot be run again ----


def draw(total, number):
    total.copy_(total + torch.rand(3, device=total.device) * number)


def keep(total, number, kept=[]):  # noqa: B006
    accumulate(total, number)
    kept.append(total * 3)


def send(total, number):
    accumulate(total, number + torch.ones(3).to(total.device) * number)


def draw_on_host(total, number):
    accumulate(total, number * 0 + number)
    torch.rand(())


def read(total, number):
    accumulate(total, number * (2 if number[0].item() > 100 else 1))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (draw, "draws random numbers by an operator that follows from no seed"),
        (keep, "1 tensor of a step is not part of the training state"),
        (draw_on_host, "draws random numbers on the host"),
        (read, "device-to-host sync"),
        (lambda total, number: accumulate(total, number) or torch.ones(3), "a result is on the host"),
    ],
    ids=["draws", "keeps", "host", "reads", "result"],
)
def test_what_cannot_be_run_again_is_traced_and_right(xla, total, function, says):
    call = Calls(xla, function, [total])
    for _ in range(3):
        call(1.0)
        assert not call.compiled.replays
    assert len(call.said) == 1 and says in call.said[0] and call.compiled.why_traced == call.said[0]
    if function in (keep, read, draw_on_host):
        assert torch.equal(xla.fetch(total), torch.full((3,), 7.0))


def test_what_is_sent_within_a_call_is_no_constant(xla, total):
    call = Calls(xla, lambda total, number: accumulate(total, number + xla.send(torch.ones(3))), [total])
    for _ in range(3):
        call(1.0)
    assert len(call.said) == 1 and "a host-to-device transfer within a step" in call.said[0]
    assert torch.equal(xla.fetch(total), torch.full((3,), 14.0))


def test_a_number_that_changes_is_found_by_the_comparison(xla, total):
    turns = iter(range(3, 100))
    call = Calls(xla, lambda total, number: total.copy_(total * next(turns) + number), [total])
    expected = torch.zeros(3)
    for turn in range(5):
        call(1.0)
        expected = expected * (3 + turn) + 1
    assert len(call.said) == 1 and call.said[0].startswith("a constant of the graph has changed (")
    assert torch.equal(xla.fetch(total), expected)


def test_a_state_that_shares_a_buffer_is_not_given_to_a_program(xla, total):
    call = Calls(xla, lambda one, other, number: one.copy_(other + number), [total, total])
    call(1.0), call(1.0)
    assert call.said == ["two tensors of the training state share a buffer"]
    assert torch.equal(xla.fetch(total), torch.full((3,), 2.0))


@pytest.mark.parametrize("equal_from", [0, 4])
@pytest.mark.parametrize("how", ["copy_", "_foreach_copy_", "to"])
def test_numbers_that_user_code_sends_have_buffers_of_their_own(xla, total, equal_from, how):
    """torch_xla sends equal numbers once, and a program that writes both would be given one buffer twice."""
    one, other = xla.send((torch.zeros(()), torch.ones(())))

    def step(total, one, other, number):
        total.add_(one * number + 3 * other)
        one.add_(number.mean())
        other.mul_(number.mean())

    call = Calls(xla, step, [total, one, other])
    expected, replayed = 0.0, 0
    for turn in range(8):
        numbers = torch.tensor(0.5 + turn), torch.tensor(0.5 + turn if turn >= equal_from else 9.5)
        with call.compiled._copies:
            if how == "_foreach_copy_":
                torch._foreach_copy_([one, other], numbers)
            else:
                for tensor, number in zip((one, other), numbers, strict=True):
                    tensor.copy_(number) if how == "copy_" else setattr(tensor, "data", number.to(xla.device))
        call(2.0)
        expected += 2 * numbers[0] + 3 * numbers[1]
        replayed += call.compiled.replays
        assert xla.fetch([one, other]) == [numbers[0] + 2, 2 * numbers[1]]
    assert call.said == [] and replayed == 6
    assert torch.equal(xla.fetch(total), expected.expand(3))


def test_a_change_is_traced_anew_and_too_many_are_not(xla, total):
    call = Calls(xla, accumulate, [total])
    for _ in range(8):
        for turn in range(3):
            call(1.0)
            assert call.compiled.replays == (turn == 2)
        call.fingerprint.changed = "a number was 2, is 3"
    assert call.fingerprint.noted == 8 and call.said == []
    call(1.0)
    call.fingerprint.changed, call.fingerprint.reason = "a number was 3, is 4", "a hook of the user's"
    call(1.0)
    assert call.said == ["a hook of the user's"] and not call.compiled.replays


def test_an_error_within_a_trace_leaves_the_state_as_it_was(xla, total):
    def fail(total, number):
        accumulate(total, number)
        if fails:
            raise ZeroDivisionError

    call, fails = Calls(xla, fail, [total]), False
    call(1.0)
    fails = True
    with pytest.raises(ZeroDivisionError):
        call(1.0)
    fails = False
    call(1.0), call(1.0)
    assert torch.equal(xla.fetch(total), torch.full((3,), 7.0))


# ---- Calls of torch_xla that fail ----


class Fails:
    """Stands for a call of torch_xla that fails from the time on that it is called for so many times."""

    def __init__(self, call, time):
        self.call, self.left = call, time

    def __call__(self, *args):
        self.left -= 1
        if self.left < 1:
            raise RuntimeError("INTERNAL: on purpose")
        return self.call(*args)


# torch_xla's private calls before a graph is run.
CALLS_BEFORE_A_RUN = (
    "_get_tensors_handle",
    "_get_tensors_xla_device_data_node",
    "_check_tensor_need_materialization",
    "_check_device_tensor_need_materialization",
    "_set_buffer_donation",
    "_get_graph_hash",
    "_xla_warm_up_cache",
)
# And with several chips.
CALLS_WITH_SEVERAL_CHIPS = ("_get_xla_sharding_specs",)
EVERY_CALL = (*CALLS_BEFORE_A_RUN, *CALLS_WITH_SEVERAL_CHIPS)


@pytest.fixture
def name(request, xla, monkeypatch):
    """The name of a call, where it is made."""
    if request.param in CALLS_WITH_SEVERAL_CHIPS:
        monkeypatch.setattr(xla, "num_chips", 2)
    return request.param


@pytest.mark.parametrize("time", [1, 2, 10])
@pytest.mark.parametrize("name", EVERY_CALL, indirect=True)
def test_where_a_call_fails_before_anything_runs_steps_are_traced(xla, total, monkeypatch, name, time):
    call, expected = Calls(xla, accumulate, [total]), torch.zeros(3)
    real = getattr(torch_xla._XLAC, name)
    fails = Fails(real, time)
    for turn in range(12):
        number = xla.send(torch.full((3,), float(turn)))
        monkeypatch.setattr(torch_xla._XLAC, name, fails)
        call(number)
        monkeypatch.setattr(torch_xla._XLAC, name, real)
        accumulate(expected, torch.full((3,), float(turn)))
        if turn in (3, 6):
            # So that further calls are made.
            call.fingerprint.changed = "something"
        assert torch.equal(xla.fetch(total), expected)
    if fails.left < 1:
        (said,) = call.said
        assert "INTERNAL: on purpose" in said and "please report this line" in said
    else:
        assert call.said == []


@pytest.mark.parametrize("name", EVERY_CALL, indirect=True)
def test_where_a_call_is_missing_steps_are_traced(xla, total, monkeypatch, name):
    call = Calls(xla, lambda total, number: accumulate(total, number) or total * 2, [total])
    number = xla.send(torch.ones(3))
    with monkeypatch.context() as patch:
        patch.delattr(torch_xla._XLAC, name)
        call(number)
    assert torch.equal(xla.fetch(total), torch.ones(3))
    (said,) = call.said
    assert name in said and f"torch_xla {torch_xla.__version__} cannot" in said


@pytest.mark.parametrize("time", [1, 3, 10])
def test_a_run_that_fails_with_the_weights_given_away_ends_with_its_cause(xla, total, monkeypatch, time):
    call = Calls(xla, accumulate, [total])
    run = torch_xla._XLAC._run_cached_graph

    def run_and_fail(handle, arguments):
        nonlocal time
        time -= 1
        results = run(handle, arguments)
        if time < 1:
            del results
            raise RuntimeError("INTERNAL: the chip is gone")
        return results

    monkeypatch.setattr(torch_xla._XLAC, "_run_cached_graph", run_and_fail)
    with pytest.raises(StateLost, match="whose values are gone. RuntimeError: INTERNAL: the chip is gone"):
        for _ in range(12):
            call(1.0)


# ---- Memory ----


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
        by_name = torch.empty_like(tensor).copy_(other=tensor)
        with copies.suspend():
            shared = tensor.clone()
    assert torch_xla._XLAC._get_tensors_handle([shared]) == torch_xla._XLAC._get_tensors_handle([tensor])
    xla.flush()
    buffers = torch_xla._XLAC._get_tensors_handle([tensor, lazy, inferred, cloned, deep, filled, by_name])
    assert len(set(buffers)) == 7
    for made in (lazy, inferred, cloned, deep, filled, by_name):
        assert made.dtype == values.dtype and torch.equal(made.cpu(), values)
    assert not xla.programs.find_aliases([tensor])
    held = tensor.detach()
    assert xla.programs.find_aliases([tensor, cloned]) == {0} and held is not None


def test_a_deep_copy_of_a_state_dict_has_buffers_of_its_own(xla):
    """Nothing is left to compute then, of which each result has its own."""
    tensor = xla.send(torch.tensor([1.0, 3.0]))
    xla.programs.separate_copies([tensor])
    with xla.programs.real_copies():
        copies = copy.deepcopy({"weight": tensor.detach(), "tied": tensor.detach()})
    xla.flush()
    assert len(set(torch_xla._XLAC._get_tensors_handle([tensor, *copies.values()]))) == 3
    assert all(torch.equal(made.cpu(), torch.tensor([1.0, 3.0])) for made in copies.values())


@pytest.mark.parametrize("enabled", [True, False])
def test_the_many_tensors_of_a_run_are_no_reason_to_collect_garbage(xla, enabled):
    state = list(xla.send([torch.zeros(2) for _ in range(50)]))
    number = xla.send(torch.ones(()))
    call = Calls(xla, lambda *tensors: [tensor.add_(tensors[-1]) for tensor in tensors[:-1]] and None, state)
    # After a trace, the first run looks for those who share memory with the state.
    call(number), call(number), call(number)
    xla.wait()
    threshold = gc.get_threshold()
    collections = []
    gc.callbacks.append(note := lambda phase, info: collections.append(phase))
    gc.collect()
    try:
        gc.set_threshold(70)
        gc.enable() if enabled else gc.disable()
        collections.clear()
        call(number)
        assert call.compiled.replays
        assert collections == []
        assert gc.isenabled() is enabled
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
        gc.callbacks.remove(note)
    assert [value.tolist() for value in xla.fetch(state)] == [[4.0, 4.0]] * 50
