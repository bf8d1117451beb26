"""LazyAdamW against PyTorch's AdamW: the same update, the same checkpoints, one program."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_tpu_ext.backends.compiled_function import CompiledFunction
from hf_tpu_ext.backends.processes import ALONE
from hf_tpu_ext.step.optimizer import LazyAdamW, check_optimizer, clip_gradients


STEPS = 20
# From 0 up to the peak and down to 0 again, as a warm-up and a decay do.
SCHEDULE = [step / 5 for step in range(5)] + [(STEPS - 1 - step) / (STEPS - 6) for step in range(5, STEPS)]
# An epsilon that is large enough to show where it is added.
SETTINGS = dict(lr=0.05, betas=(0.9, 0.98), eps=1e-3)


def make_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), (2, 2))]


def make_gradients(step):
    """The last weight takes part from the eighth step on, so its step counter is another than the others'."""
    gradients = make_weights(seed=100 + step)
    gradients[1] *= 1e-3
    return gradients[:2] + [gradients[2] if step >= 7 else None]


def make_parameters(weights, backend=None, dtype=torch.float64):
    tensors = [weight.detach().to(dtype, copy=True) for weight in weights]
    return [nn.Parameter(tensor if backend is None else backend.send(tensor)) for tensor in tensors]


def groups(parameters):
    return [
        {"params": [parameters[0], parameters[2]], "weight_decay": 0.1},
        {"params": [parameters[1]], "weight_decay": 0.0, "lr": 0.2},
    ]


def take_steps(optimizer, parameters, steps, backend=None):
    peaks = [0.05, 0.2]
    for step in steps:
        for parameter, gradient in zip(parameters, make_gradients(step), strict=True):
            if gradient is not None:
                gradient = gradient.to(parameter.dtype)
                gradient = gradient if backend is None else backend.send(gradient)
            parameter.grad = gradient
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * SCHEDULE[step]
        optimizer.step()
        if backend is not None:
            backend.end_step()


def reference(dtype=torch.float64, steps=range(STEPS), **kwargs):
    parameters = make_parameters(make_weights(), dtype=dtype)
    optimizer = torch.optim.AdamW(groups(parameters), **SETTINGS, **kwargs)
    take_steps(optimizer, parameters, steps)
    return parameters, optimizer


def assert_same(backend, parameters, optimizer, expected, expected_optimizer, **tolerance):
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(backend.fetch(mine).double(), theirs.detach().double(), **tolerance)
        my_state, their_state = backend.fetch(optimizer.state[mine]), expected_optimizer.state[theirs]
        assert set(my_state) == set(their_state)
        assert my_state["step"].item() == their_state["step"].item()
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(my_state[name].double(), their_state[name].double(), **tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The factors that change at each step travel in float32.
    [(torch.float64, 1e-7), (torch.float32, 2e-6)],
    ids=["float64", "float32"],
)
def test_twenty_steps(backend, dtype, tolerance):
    expected, expected_optimizer = reference()
    parameters = make_parameters(make_weights(), backend, dtype)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    take_steps(optimizer, parameters, range(STEPS), backend)
    assert_same(backend, parameters, optimizer, expected, expected_optimizer, rtol=tolerance, atol=tolerance)
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [20, 20, 13]


def test_bfloat16_weights(backend):
    """As far from the float64 run as PyTorch's own update in bfloat16 is: 8 bits, rounded once a step."""
    exact, _ = reference()
    stock, _ = reference(torch.bfloat16)
    parameters = make_parameters(make_weights(), backend, torch.bfloat16)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    take_steps(optimizer, parameters, range(STEPS), backend)
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    moments = {state[name].dtype for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}
    assert moments == {torch.bfloat16}
    for mine, theirs, truth in zip(parameters, stock, exact, strict=True):
        mine_off = (backend.fetch(mine).double() - truth).abs().mean()
        theirs_off = (theirs.double() - truth).abs().mean()
        assert mine_off < 1.5 * theirs_off, "another update than PyTorch's"


def test_a_learning_rate_of_zero_changes_no_weight_but_the_moments(backend):
    parameters = make_parameters(make_weights(), backend, torch.float32)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    take_steps(optimizer, parameters, [0], backend)
    for parameter, weight in zip(parameters, make_weights(), strict=True):
        assert torch.equal(backend.fetch(parameter), weight.float())
    assert backend.fetch(optimizer.state[parameters[0]]["exp_avg"]).abs().min() > 0


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_checkpoint_of_torch_adamw_goes_on_here(backend, fused, xla):
    half, stock = reference(torch.float32, range(10), fused=fused)
    expected, expected_optimizer = reference()
    parameters = make_parameters(half, backend, torch.float32)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    optimizer.load_state_dict(stock.state_dict())
    # Counters on the device would be read at each step.
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    before = xla.counters()
    take_steps(optimizer, parameters, range(10, STEPS), backend)
    assert (xla.counters() - before).reads == 0
    assert_same(backend, parameters, optimizer, expected, expected_optimizer, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_checkpoint_from_here_goes_on_in_torch_adamw(backend, fused):
    expected, expected_optimizer = reference()
    parameters = make_parameters(make_weights(), backend, torch.float32)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    take_steps(optimizer, parameters, range(10), backend)
    eager = make_parameters([backend.fetch(parameter) for parameter in parameters], dtype=torch.float32)
    stock = torch.optim.AdamW(groups(eager), **SETTINGS, fused=fused)
    state_dict = backend.fetch(optimizer.state_dict())
    assert state_dict["param_groups"][0].keys() == stock.state_dict()["param_groups"][0].keys()
    stock.load_state_dict(state_dict)
    take_steps(stock, eager, range(10, STEPS))
    for mine, theirs in zip(eager, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=2e-6)
        assert stock.state[mine]["step"].item() == expected_optimizer.state[theirs]["step"].item()


def test_own_checkpoint_goes_on_bit_for_bit(backend):
    parameters = make_parameters(make_weights(), backend, torch.float32)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    take_steps(optimizer, parameters, range(10), backend)
    state_dict = copy.deepcopy(backend.fetch(optimizer.state_dict()))
    resumed = make_parameters([backend.fetch(parameter) for parameter in parameters], backend, torch.float32)
    resumed_optimizer = LazyAdamW(groups(resumed), backend, **SETTINGS)
    resumed_optimizer.load_state_dict(state_dict)
    take_steps(optimizer, parameters, range(10, STEPS), backend)
    take_steps(resumed_optimizer, resumed, range(10, STEPS), backend)
    for mine, theirs in zip(parameters, resumed, strict=True):
        assert torch.equal(backend.fetch(mine), backend.fetch(theirs))


def test_one_program_whatever_the_numbers_are(xla):
    """A rate of 0 and of 1, a decay factor of exactly 1, and a second-moment correction that has rounded to 1."""
    rates = [0.0, 0.3, 1.0, 0.0, 1e-9] + [0.01] * 30
    parameters = make_parameters(make_weights()[:2], xla, torch.float32)
    optimizer = LazyAdamW(parameters, xla, lr=1.0, betas=(0.9, 0.5), weight_decay=0.01)
    optimizer.create_state()
    gradients = [xla.send(gradient.float()) for gradient in make_gradients(0)[:2]]
    xla.wait()
    spent = []
    for rate in rates:
        before = xla.counters()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        xla.wait()
        spent.append(xla.counters() - before)
    assert torch.tensor(1 - 0.5 ** len(rates)) ** 0.5 == 1
    assert [step.compiles for step in spent] == [1] + [0] * (len(rates) - 1)
    assert [step.executions for step in spent] == [1] * len(rates)
    assert [step.reads for step in spent] == [0] * len(rates)


def test_state_is_there_before_the_first_step(backend):
    parameters = make_parameters(make_weights(), backend, torch.float32)
    optimizer = LazyAdamW(parameters, backend)
    optimizer.create_state()
    for parameter in parameters:
        state = backend.fetch(optimizer.state[parameter])
        assert state["step"].item() == 0 and state["exp_avg"].shape == parameter.shape
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    take_steps_once = [state["exp_avg"] for state in optimizer.state.values()]
    optimizer.create_state()
    assert all(a is b["exp_avg"] for a, b in zip(take_steps_once, optimizer.state.values(), strict=True))


def test_closure_and_nothing_to_do(backend):
    parameter = nn.Parameter(backend.send(torch.tensor([2.0])))
    optimizer = LazyAdamW([parameter], backend, lr=0.1, weight_decay=0.0)
    assert optimizer.step() is None
    assert backend.fetch(parameter).item() == 2

    def closure():
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert backend.fetch(optimizer.step(closure)).item() == 4
    assert backend.fetch(parameter).item() == pytest.approx(1.9)


@pytest.mark.parametrize("max_norm", [0.5, 1e4], ids=["clipped", "left alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping(backend, max_norm, dtype):
    model, expected = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype) for _ in range(2))
    backend.place(model)
    for index, (mine, theirs) in enumerate(zip(model.parameters(), expected.parameters(), strict=True)):
        if index != 2:
            theirs.grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(index)).to(dtype)
            mine.grad = backend.send(theirs.grad.clone())
    norm = clip_gradients(model, max_norm)
    expected_norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
    tolerance = {} if dtype == torch.float32 else dict(rtol=2**-7, atol=2**-9)
    # Of bfloat16, upstream rounds it.
    assert norm.dtype == torch.float32
    torch.testing.assert_close(backend.fetch(norm).to(dtype), expected_norm, **tolerance)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(backend.fetch(mine.grad), theirs.grad, **tolerance)


def test_clipping_is_one_program(xla):
    model = xla.place(nn.Linear(3, 3))
    spent = []
    for scale in (5.0, 0.0, 1e-3, float("nan")):
        model.weight.grad, model.bias.grad = xla.send([torch.full((3, 3), scale), torch.full((3,), scale)])
        xla.wait()
        before = xla.counters()
        norm = clip_gradients(model, 1.0)
        xla.wait()
        spent.append(xla.counters() - before)
    assert [(step.compiles, step.executions, step.reads) for step in spent] == [(1, 1, 0)] + [(0, 1, 0)] * 3
    assert xla.fetch(norm).isnan()


class RunByHandle(CompiledFunction):
    """Runs no Python of a program that it has traced before, but what is computed."""

    def _run_program(self, key, state, call):
        (optimizer,) = self.traced
        noted = optimizer.updated_states
        self._function(call.data, **call.static_args)
        if key in self._programs:
            self.replays, optimizer.updated_states = True, noted
        self._programs[key] = True


def test_counters_of_steps_that_update_one_set_of_parameters_and_then_another():
    """As with images in every other batch."""
    programs = SimpleNamespace(compile=lambda *args: RunByHandle(backend, *args))
    backend = SimpleNamespace(
        compiles_functions=True,
        compiles_operators=True,
        flush=lambda: None,
        end_step=lambda: None,
        send=lambda data: data,
        processes=ALONE,
        programs=programs,
    )
    weights = make_weights()
    parameters, expected = make_parameters(weights), make_parameters(weights)
    optimizer = LazyAdamW(parameters, backend=backend, **SETTINGS)
    RunByHandle.traced = [optimizer]
    expected_optimizer = torch.optim.AdamW(expected, **SETTINGS)
    for step in range(8):
        gradients = make_gradients(8 * (step % 2))
        for mine, theirs, gradient in zip(parameters, expected, gradients, strict=True):
            mine.grad = theirs.grad = gradient
        optimizer.step()
        expected_optimizer.step()
    for mine, theirs in zip(parameters, expected, strict=True):
        assert optimizer.state[mine]["step"].item() == expected_optimizer.state[theirs]["step"].item()
        # The factors travel in float32.
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_optimizer_of_other_weights(backend):
    model = backend.place(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    check_optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    stale = [*model[0].parameters(), nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="optimizer_cls_and_kwargs=\\(SGD, {'lr': 0.1, 'momentum': 0.9,"):
        check_optimizer(torch.optim.SGD(stale, lr=0.1, momentum=0.9), model)

    class WithoutRate(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    with pytest.raises(ValueError, match="make the optimizer from self.model in an override of create_optimizer"):
        check_optimizer(WithoutRate(stale), model)


def test_counters_that_were_replaced_or_set_are_those_that_count(backend):
    """All counters are kept in one tensor; whoever puts another in its place is heard."""
    parameters = make_parameters(make_weights(), backend)
    optimizer = LazyAdamW(parameters, backend=backend)
    optimizer.create_state()
    states = list(optimizer.state.values())
    before = optimizer.program_key
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [state["step"].item() for state in states] == [1, 1, 1]
    optimizer.create_state()
    assert optimizer.program_key == before
    states[0]["step"].fill_(7)
    states[1]["step"] = torch.tensor(3.0)
    optimizer.create_state()
    assert (key := optimizer.program_key) != before
    # The numbers of a parameter are those of its rank, which a program is made for.
    states[1]["step"] = torch.tensor(9.0)
    optimizer.create_state()
    assert optimizer.program_key != key
    states[1]["step"] = torch.tensor(3.0)
    optimizer.step()
    assert [state["step"].item() for state in states] == [8, 4, 2]
    del optimizer.state[parameters[2]]
    optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [9, 5, 1]


def test_in_the_place_of_an_adamw_with_its_groups_and_state(xla):
    weights = [torch.nn.Parameter(xla.send(torch.ones(3))) for _ in range(2)]
    made = torch.optim.AdamW(
        [{"params": weights[:1], "lr": 0.5, "weight_decay": 0.0}, {"params": weights[1:]}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0 / (1 + step))
    for weight in weights:
        weight.grad = xla.send(torch.tensor([1.0, 2.0, 3.0]))
    made.step()
    moments = [[xla.fetch(made.state[weight][name]) for name in ("exp_avg", "exp_avg_sq")] for weight in weights]
    own = LazyAdamW.in_place_of(made, xla)
    assert isinstance(own, LazyAdamW) and [group["lr"] for group in own.param_groups] == [0.5, 0.1]
    for weight, of_weight in zip(weights, moments, strict=True):
        for name, moment in zip(("exp_avg", "exp_avg_sq"), of_weight, strict=True):
            torch.testing.assert_close(xla.fetch(own.state[weight][name]), moment, rtol=0, atol=0)
        assert own.state[weight]["step"] == 1
    for weight in weights:
        weight.grad = xla.send(torch.ones(3))
    own.step()
    schedule.step()
    assert [group["lr"] for group in own.param_groups] == [0.25, 0.05] and made.state.keys() == own.state.keys()
    decayed = (1 - 0.1 * 0.01) * (1 - 0.1 * 0.01 - 0.1) - 0.1
    assert [xla.fetch(weight.detach())[0].item() for weight in weights] == pytest.approx([0, decayed], abs=1e-6)


@pytest.mark.parametrize("options", [dict(amsgrad=True), dict(maximize=True), dict(lr=torch.tensor(0.1))], ids=str)
def test_another_update_than_this_one_is_left_to_pytorch(xla, options):
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **{"foreach": False, **options})
    assert LazyAdamW.in_place_of(made, xla) is made
    hooked = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    hooked.register_step_post_hook(lambda *_: None)
    assert LazyAdamW.in_place_of(hooked, xla) is hooked
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    assert LazyAdamW.in_place_of(sgd, xla) is sgd


def test_parameters_that_a_step_leaves_out_are_in_the_same_program_before_and_after(backend):
    """A step of all parameters after one without some, as a batch with images after one without."""
    weights = make_weights()
    parameters, expected = make_parameters(weights, backend), make_parameters(weights)
    optimizer, expected_optimizer = LazyAdamW(parameters, backend=backend), torch.optim.AdamW(expected)
    optimizer.sometimes_unused = {parameters[-1]}
    optimizer.create_state()
    before, rows = optimizer.program_key, optimizer.numbers().shape
    for used in (3, 2, 3):
        for each in (parameters, expected):
            for number, parameter in enumerate(each):
                parameter.grad = torch.full_like(parameter, number + 1.0) if number < used else None
        optimizer.step()
        expected_optimizer.step()
        assert optimizer.numbers().shape == rows and optimizer.program_key == before
    assert [state["step"].item() for state in optimizer.state.values()] == [3, 3, 2]
    for mine, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach(), rtol=1e-6, atol=1e-7)
