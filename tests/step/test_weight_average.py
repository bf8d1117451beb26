"""The average of the weights against a float64 one, inside LazyAdamW's program and by itself."""

import copy

import pytest
import torch
from test_optimizer import SETTINGS, STEPS, groups, make_parameters, make_weights, take_steps
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hf_tpu_ext.step.ema import WeightAverage, in_place_of_weights
from hf_tpu_ext.step.optimizer import LazyAdamW


def decay_of(update, warmup):
    return min(0.9, (1 + update) / (10 + update)) if warmup else 0.9


def reference(trajectory, warmup):
    """The last of the averages that PyTorch makes of a trajectory, in float64: the weights before and after each step."""
    averages, *weights = ([weight.double().clone() for weight in step] for step in trajectory)
    for update, step in enumerate(weights):
        get_ema_multi_avg_fn(decay_of(update, warmup))(averages, step, None)
    return averages


def train(backend, dtype, warmup, steps=STEPS):
    parameters = make_parameters(make_weights(), backend, dtype)
    optimizer = LazyAdamW(groups(parameters), backend, **SETTINGS)
    optimizer.average = average = WeightAverage(0.9, warmup)
    average.follow(parameters)
    trajectory = [copy.deepcopy(backend.fetch(parameters))]
    for step in range(steps):
        take_steps(optimizer, parameters, [step], backend)
        trajectory.append(copy.deepcopy(backend.fetch(parameters)))
    return average, trajectory


@pytest.mark.parametrize("warmup", [False, True], ids=["constant", "warm-up"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float64_reference(backend, dtype, warmup):
    """Also of the weight that takes no part in the first steps."""
    average, trajectory = train(backend, dtype, warmup)
    assert average.updates == STEPS
    # The share travels in float32.
    tolerance = 1e-7 if dtype == torch.float64 else 1e-6
    if dtype == torch.bfloat16 and backend.traces_steps:
        # XLA averages new weights before it rounds them, which are up to half a unit in the last place away.
        tolerance = 2**-9
    for mine, theirs in zip(backend.fetch(list(average.values.values())), reference(trajectory, warmup), strict=True):
        # Of bfloat16 weights, too, it is float32.
        assert mine.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eagerly_it_is_the_same(dtype):
    trajectory = [make_parameters(make_weights(seed=step), dtype=dtype) for step in range(STEPS)]
    average = WeightAverage(0.9, warmup=True)
    parameters = copy.deepcopy(trajectory[0])
    average.follow(parameters)
    for step in trajectory[1:]:
        for parameter, weight in zip(parameters, step, strict=True):
            parameter.data.copy_(weight)
        average.update_eagerly(average.next_decay())
    for mine, theirs in zip(average.values.values(), reference(trajectory, warmup=True), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)


def test_the_decay_of_a_warm_up_is_data(xla):
    parameters = make_parameters(make_weights()[:2], xla, torch.float32)
    optimizer = LazyAdamW(parameters, xla, lr=0.1)
    optimizer.average = WeightAverage(0.5, warmup=True)
    optimizer.average.follow(parameters)
    optimizer.create_state()
    gradients = [xla.send(torch.ones(parameter.shape)) for parameter in parameters]
    xla.wait()
    spent = []
    for _ in range(12):
        before = xla.counters()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        xla.wait()
        spent.append(xla.counters() - before)
    # From the ninth on it is constant.
    assert [decay_of(update, True) for update in (0, 1)] == [0.1, 2 / 11]
    assert [step.compiles for step in spent] == [1] + [0] * 11
    assert [(step.executions, step.reads) for step in spent] == [(1, 0)] * 12


def test_parameters_that_come_and_go(backend):
    first, second, third = make_parameters(make_weights(), backend)
    average = WeightAverage(0.5)
    average.follow([first, second])
    average.next_decay()
    kept = average.values[first]
    average.follow([third, first])
    assert [*average.values] == [third, first] and average.values[first] is kept and average.updates == 1
    average.follow([second])
    assert average.updates == 0
    average.restart()
    assert not average.values


def test_a_stacked_parameter_is_split(backend):
    stacked, single, *parts = make_parameters([torch.arange(6.0).view(2, 3), *torch.ones(3, 3)], backend)
    average = WeightAverage(0.5)
    average.follow([stacked, single])
    average.split(stacked, parts)
    assert [*average.values] == [single, *parts]
    assert backend.fetch([average.values[part] for part in parts])[1].tolist() == [3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_of_weights(backend, dtype):
    (parameter,) = make_parameters([torch.tensor([1.0, 2.0])], backend, dtype)
    average = backend.send(torch.tensor([3.0, 4.0]))
    with pytest.raises(KeyError), in_place_of_weights([(parameter, average)]):
        assert backend.fetch(parameter).tolist() == [3, 4] and parameter.dtype == dtype
        raise KeyError
    assert backend.fetch(parameter).tolist() == [1, 2]
    assert backend.fetch(average).tolist() == [3, 4]
