"""The logged loss: a mean of finite steps, and which one was not."""

import math

import pytest
import torch

from hf_tpu_ext.step.metrics import LossLog


NAN, INF = float("nan"), float("inf")


def add_all(log, backend, steps):
    """`steps` holds the losses of the micro-steps of each optimizer step."""
    for micro_steps in steps:
        for index, loss in enumerate(micro_steps):
            log.add(
                backend.send(torch.tensor(loss)),
                closing=index == len(micro_steps) - 1,
                accumulating=len(micro_steps) > 1,
            )
    return log.read(backend.fetch(log.tensors))


@pytest.mark.parametrize(
    ("steps", "total", "finite_steps", "first_nonfinite"),
    [
        ([[1.0], [2.5], [0.5]], 4.0, 3, 0),
        ([[1.0], [NAN], [3.0]], 4.0, 2, 2),
        ([[INF], [NAN], [3.0]], 3.0, 1, 1),
        ([[1.0], [2.0], [-INF]], 3.0, 2, 3),
        ([[NAN], [NAN]], 0.0, 0, 1),
        ([], 0.0, 0, 0),
        ([[1.0, 2.0], [0.5, 0.25]], 3.75, 2, 0),
        ([[1.0, 2.0, 4.0], [NAN, 1.0, 1.0], [1.0, 1.0, 1.0]], 10.0, 2, 2),
        ([[1.0, 1.0], [1.0, INF], [INF, 1.0]], 2.0, 1, 2),
    ],
    ids=str,
)
def test_window(backend, steps, total, finite_steps, first_nonfinite):
    log = LossLog(backend)
    window = add_all(log, backend, steps)
    assert window.total == pytest.approx(total)
    assert (window.steps, window.finite_steps, window.first_nonfinite) == (len(steps), finite_steps, first_nonfinite)
    if finite_steps:
        assert window.mean == pytest.approx(total / finite_steps)
    else:
        assert math.isnan(window.mean)
    # What was read is gone, a NaN included.
    again = add_all(log, backend, [[2.0, 2.0], [2.0, 3.0]])
    assert (again.total, again.steps, again.finite_steps, again.first_nonfinite) == (9.0, 2, 2, 0)


def test_loss_in_bfloat16_is_summed_in_float32(backend):
    log = LossLog(backend)
    for _ in range(3):
        log.add(backend.send(torch.tensor(257.0, dtype=torch.bfloat16)), closing=True, accumulating=False)
    # 257 is 256 in 8 bits; 768 + 256 needs more than them.
    assert log.read(backend.fetch(log.tensors)).total == 768


def test_autograd_does_not_follow(backend):
    log = LossLog(backend)
    loss = backend.send(torch.tensor(1.0)).requires_grad_() * 2
    log.add(loss, closing=False, accumulating=True)
    log.add(loss, closing=True, accumulating=True)
    assert not any(tensor.requires_grad for tensor in log.tensors.values())


@pytest.mark.parametrize("accumulating", [False, True])
def test_no_reads_and_no_other_program(xla, accumulating):
    log = LossLog(xla)
    losses = [xla.send(torch.tensor(value)) for value in (1.0, 0.0, NAN, 2.0, INF, -1.0)]
    xla.wait()
    spent = {True: [], False: []}
    for index, loss in enumerate(losses):
        closing = not accumulating or index % 2 == 1
        before = xla.counters()
        log.add(loss, closing=closing, accumulating=accumulating)
        xla.wait()
        spent[closing].append(xla.counters() - before)
    for steps in spent.values():
        assert all(step.reads == 0 for step in steps)
        assert all(step.compiles == 0 for step in steps[1:])
