"""The logged loss: upstream's sum, on the device, and which loss was not finite."""

import math

import pytest
import torch

from hf_tpu_ext.step.metrics import LossLog


NAN, INF = float("nan"), float("inf")


def add_all(log, backend, steps):
    """`steps` holds the losses of the micro-steps of each optimizer step."""
    for micro_steps in steps:
        for index, loss in enumerate(micro_steps):
            log.add(backend.send(torch.tensor(loss)), sync_gradients=index == len(micro_steps) - 1)
    return log.read(backend.fetch(log.tensors))


def add_as_upstream(steps, filters):
    """What upstream's loop adds up: `Trainer._run_epoch`."""
    total = 0.0
    for number, micro_steps in enumerate(steps):
        for loss in micro_steps:
            total += total / (1 + number) if filters and not math.isfinite(loss) else loss
    return total


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize(
    ("steps", "nonfinite", "first_nonfinite"),
    [
        ([[1.0], [2.5], [0.5]], 0, 0),
        ([[1.0], [NAN], [3.0]], 1, 2),
        ([[INF], [NAN], [3.0]], 2, 1),
        ([[1.0], [2.0], [-INF]], 1, 3),
        ([[NAN], [NAN]], 2, 1),
        ([[]], 0, 0),
        ([[1.0, 2.0], [0.5, 0.25]], 0, 0),
        ([[1.0, 2.0, 4.0], [NAN, 1.0, 1.0], [1.0, 1.0, 1.0]], 1, 2),
        ([[1.0, 1.0], [1.0, INF], [INF, 1.0]], 2, 2),
    ],
    ids=str,
)
def test_window(backend, steps, nonfinite, first_nonfinite, filters):
    log = LossLog(backend, filters)
    window = add_all(log, backend, steps)
    taken = sum(map(bool, steps))
    assert (window.steps, window.nonfinite, window.first_nonfinite) == (taken, nonfinite, first_nonfinite)
    assert window.total == pytest.approx(add_as_upstream(steps, filters), nan_ok=True)
    assert window.mean == pytest.approx(window.total / max(taken, 1), nan_ok=True)
    # What was read is gone, a NaN included.
    again = add_all(log, backend, [[2.0, 2.0], [2.0, 3.0]])
    assert (again.total, again.steps, again.nonfinite, again.first_nonfinite) == (9.0, 2, 0, 0)


def test_loss_in_bfloat16_is_summed_in_float32(backend):
    log = LossLog(backend, True)
    for _ in range(3):
        log.add(backend.send(torch.tensor(257.0, dtype=torch.bfloat16)), sync_gradients=True)
    # 257 is 256 in 8 bits; 768 + 256 needs more than them.
    assert log.read(backend.fetch(log.tensors)).total == 768


def test_autograd_does_not_follow(backend):
    log = LossLog(backend, True)
    loss = backend.send(torch.tensor(1.0)).requires_grad_() * 2
    log.add(loss, sync_gradients=False)
    log.add(loss, sync_gradients=True)
    assert not any(tensor.requires_grad for tensor in log.tensors.values())


@pytest.mark.parametrize("accumulating", [False, True])
def test_no_reads_and_no_other_program(xla, accumulating):
    log = LossLog(xla, True)
    losses = [xla.send(torch.tensor(value)) for value in (1.0, 0.0, NAN, 2.0, INF, -1.0)]
    xla.wait()
    spent = {True: [], False: []}
    for index, loss in enumerate(losses):
        sync_gradients = not accumulating or index % 2 == 1
        before = xla.counters()
        log.add(loss, sync_gradients=sync_gradients)
        xla.wait()
        spent[sync_gradients].append(xla.counters() - before)
    for steps in spent.values():
        assert all(step.reads == 0 for step in steps)
        assert all(step.compiles == 0 for step in steps[1:])
