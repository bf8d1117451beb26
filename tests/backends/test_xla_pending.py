"""What was traced and has not run yet is known without going over all tensors."""

import pytest
import torch
import torch_xla

from hf_tpu_ext.backends.xla.graphs import PendingGraph, pending


def is_pending(backend):
    return any(torch_xla._XLAC._check_device_tensor_need_materialization(str(backend.device)))


@pytest.mark.parametrize(
    "trace",
    [
        lambda a, b: a * 2,
        lambda a, b: a.add_(1),
        lambda a, b: a.fill_(2.0),
        lambda a, b: a.zero_(),
        lambda a, b: a.uniform_(),
        lambda a, b: a.view(4)[1:3].mul_(2),
        lambda a, b: a.__setitem__(0, 3.0),
        lambda a, b: a.copy_(b.int()),
        lambda a, b: torch._foreach_add_([a, b], 1),
        lambda a, b: setattr(a, "data", b * 2),
    ],
)
def test_operators_are_noticed_in_place_too(xla, trace):
    a, b = xla.send(torch.ones(2, 2)), xla.send(torch.ones(2, 2))
    xla.wait()
    assert not pending.any(xla.device)
    made = trace(a, b)
    assert is_pending(xla)
    assert pending.any(xla.device)
    xla.flush()
    assert not is_pending(xla)
    del made


def test_a_barrier_is_noticed(xla):
    a = xla.send(torch.ones(2, 2))
    xla.wait()
    assert not pending.any(xla.device)
    xla.separate([a])
    assert pending.any(xla.device)
    xla.wait()


def test_transfers_leave_nothing_to_ask(xla, monkeypatch):
    xla.wait()
    assert not pending.any(xla.device)
    asked = []
    monkeypatch.setattr(pending, "note", lambda none: asked.append(none))
    kept = xla.send([torch.ones(2), torch.zeros(3)])
    xla.flush()
    assert asked == []
    kept[0].add_(1)
    xla.flush()
    assert asked == [False]


def test_without_functionalization_it_is_asked_each_time(xla, monkeypatch):
    monkeypatch.setenv("XLA_DISABLE_FUNCTIONALIZATION", "1")
    graph = PendingGraph()
    xla.wait()
    assert not graph.any(xla.device)
    assert graph._none_at is None
