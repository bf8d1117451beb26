"""Sums on the device: exact, read at once, and one program from the first step on."""

import pytest
import torch

from hf_tpu_ext.step.metrics import DeviceSums


def test_counts_are_exact_where_float32_is_not(backend):
    sums = DeviceSums(backend, floats=["loss"], integers=["tokens"])
    large = 2**24
    sums.add(tokens=backend.send(torch.tensor(large)))
    for _ in range(3):
        sums.add(tokens=backend.send(torch.tensor(1)), loss=backend.send(torch.tensor(0.25)))
    fetched = backend.fetch(sums.tensors)
    assert fetched["tokens"].item() == large + 3
    assert fetched["loss"].item() == 0.75
    assert (fetched["tokens"].dtype, fetched["loss"].dtype) == (torch.int64, torch.float32)
    sums.add(tokens=backend.send(torch.tensor(2**40)))
    assert backend.fetch(sums.tensors["tokens"]).item() == 2**40 + large + 3


def test_values_of_other_dtypes_are_converted(backend):
    sums = DeviceSums(backend, floats=["loss"], integers=["steps"])
    sums.add(loss=backend.send(torch.tensor(1.5, dtype=torch.bfloat16)), steps=backend.send(torch.tensor(True)))
    sums.add(steps=backend.send(torch.tensor(True)))
    sums.put(loss=backend.send(torch.tensor(3, dtype=torch.int32)))
    assert backend.fetch(sums.tensors["steps"]).item() == 2
    assert (sums.tensors["loss"].dtype, sums.tensors["steps"].dtype) == (torch.float32, torch.int64)
    assert backend.fetch(sums.tensors["loss"]).item() == 3


def test_autograd_does_not_follow(backend):
    sums = DeviceSums(backend, floats=["loss"], integers=[])
    weight = backend.send(torch.tensor(2.0)).requires_grad_()
    sums.add(loss=weight * 3)
    assert not sums.tensors["loss"].requires_grad
    sums.put(loss=weight * 4)
    assert not sums.tensors["loss"].requires_grad


def test_reset(backend):
    sums = DeviceSums(backend, floats=["a", "b"], integers=["n"])
    one = backend.send(torch.tensor(1.0))

    def add():
        sums.add(a=one, b=one, n=one)
        return {name: value.item() for name, value in backend.fetch(sums.tensors).items()}

    assert add() == {"a": 1, "b": 1, "n": 1}
    sums.reset(["a", "n"])
    assert add() == {"a": 1, "b": 2, "n": 1}
    sums.reset()
    # Whatever has happened to the sums, what they are reset to is 0.
    sums.tensors["a"].add_(one)
    sums.reset()
    assert add() == {"a": 1, "b": 1, "n": 1}


def test_one_program_and_one_read(xla):
    sums = DeviceSums(xla, floats=["loss", "entropy"], integers=["tokens"])
    step_values = [xla.send({"loss": torch.tensor(v), "entropy": torch.tensor(2 * v)}) for v in (0.0, 1.0, 0.3, -1.0)]
    mask = xla.send(torch.ones(3, 5, dtype=torch.int64))
    xla.wait()
    spent = []
    for values in step_values:
        before = xla.counters()
        sums.add(**values, tokens=mask.sum())
        xla.wait()
        spent.append(xla.counters() - before)
    assert [step.compiles for step in spent] == [1, 0, 0, 0], "sums that start as constants make a first program"
    assert [(step.executions, step.reads) for step in spent] == [(1, 0)] * 4
    before = xla.counters()
    fetched = xla.fetch(sums.tensors)
    assert (xla.counters() - before).reads == 1
    assert fetched["tokens"].item() == 60 and fetched["entropy"].item() == pytest.approx(0.6)
    # A reset is data, too: the step after a log is the same program.
    sums.reset()
    before = xla.counters()
    sums.add(**step_values[2], tokens=mask.sum())
    xla.wait()
    assert (xla.counters() - before).compiles == 0
