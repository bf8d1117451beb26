"""Steps that upstream's loop runs, on a device that compiles each operator."""

from types import SimpleNamespace

import pytest
import torch

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.trainers.run.eager_steps import EagerSteps


def test_an_update_that_fails_leaves_learning_rates_as_numbers():
    """They are tensors within the update only."""
    trainer = SimpleNamespace(
        backend=CPUBackend("for the test"),
        programs=None,
        begin_batches=lambda: None,
        begin_watch=lambda: None,
        reset_upstream_loss=lambda: None,
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25, fused=True)
    steps = EagerSteps(trainer)
    state = SimpleNamespace(global_step=0)
    steps.on_train_begin(None, state, None, None, SimpleNamespace(optimizer=optimizer))
    (group,) = optimizer.param_groups

    def fail(optimizer, *_):
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
        raise RuntimeError("out of memory")

    failing = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    steps.end_run()
    assert group["lr"] == 0.25 and type(group["lr"]) is float
    # And one that does not.
    failing.remove()
    steps.on_train_begin(None, state, None, None, SimpleNamespace(optimizer=optimizer))
    group["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert type(group["lr"]) is float
    steps.end_run()
