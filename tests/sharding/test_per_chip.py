"""Gradients that wait on their chip, on eight devices in a process of their own."""

import json
import os
import sys

import forked
import pytest


PREPARE = """
import torch
from torch import nn

from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.sharding import resolve_mesh
from hf_tpu_ext.sharding.per_chip import LocalGradients

backend = select_backend("xla")
backend.use_mesh(resolve_mesh("data", backend.num_chips))
torch.manual_seed(0)


def place(model):
    backend.place(model)
    for tensor in (*model.parameters(), *model.buffers()):
        backend.shard(tensor, (None,) * tensor.ndim)
    return model
"""


# Tied, frozen and unused parameters, two optimizer steps of three micro-steps.
SUMS_OF_THE_WHOLE_BATCH = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, rows):
        return self.second(self.first(rows).tanh()).square().sum()

model = Model()
reference = Model().double()
reference.load_state_dict(model.state_dict())
local = LocalGradients(place(model), backend, accumulates=True)
backend.wait()
for step in range(2):
    reference.zero_grad()
    losses = 0
    for micro_step in range(3):
        rows = torch.randn(16, 6)
        reference(rows.double()).backward()
        sent = backend.send_rows(rows, 16)
        before = backend.counters()
        with local.micro_step(sync_gradients=micro_step == 2):
            assert backend.manual_sharding.active
            loss = model(backend.manual_sharding.full_to_shard(sent, by_rows=True))
            loss.backward()
            total = local.over_chips(loss.detach())
        assert not backend.manual_sharding.active
        backend.wait()
        assert (backend.counters() - before).executions == 1
        torch.testing.assert_close(backend.fetch(total).double(), reference(rows.double()).detach())
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None or not backend.fetch(parameter.grad).any(), name
        else:
            torch.testing.assert_close(backend.fetch(parameter.grad).double(), expected.grad, rtol=1e-5, atol=1e-5)
        parameter.grad = None
assert model.second.weight is model.first.weight
"""

# Recomputed in the backward pass or not.
A_DROPOUT_OF_EACH_CHIP = """
from hf_tpu_ext.layers.activation_checkpointing import recompute
from hf_tpu_ext.layers.random_numbers import RandomNumbers
seed = torch.tensor(3, dtype=torch.int32)
whole = RandomNumbers(seed).drop(torch.ones(8, 4096), 0.25)
for recomputed in (False, True):
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(4096, 1, bias=False))
    local = LocalGradients(place(model), backend, accumulates=True)
    rows = backend.send_rows(torch.ones(8, 4096), 8)
    with RandomNumbers(backend.send(seed)), local.micro_step(sync_gradients=False):
        row = backend.manual_sharding.full_to_shard(rows, by_rows=True).requires_grad_()
        loss = (recompute(model, backend, False, model, row) if recomputed else model(row)).sum()
        loss.backward()
        losses = backend.manual_sharding.shard_to_full(loss.reshape(1))
    (gradients,) = backend.fetch(list(local._sums.values()))  # (chips, 1, 4096): the inputs that were kept
    gradients = gradients[:, 0]
    # Each chip drops of its rows what one chip drops of them.
    torch.testing.assert_close(gradients, whole)
    # The backward pass saw the numbers of the forward pass, recomputed or not.
    torch.testing.assert_close(backend.fetch(losses), gradients @ model[1].weight.detach().cpu()[0])
"""

# As a vision tower, where the last batch has no images.
A_PARAMETER_THAT_THE_LAST_MICRO_STEP_LEAVES_OUT = """
model = nn.ModuleDict({"always": nn.Linear(6, 6), "first": nn.Linear(6, 6)})
reference = nn.ModuleDict({"always": nn.Linear(6, 6), "first": nn.Linear(6, 6)})
reference.load_state_dict(model.state_dict())
local = LocalGradients(place(model), backend, accumulates=True)

def loss_of(net, rows, micro_step):
    return (net["always"](rows) + (net["first"](rows) if micro_step == 0 else 0)).square().sum()

for step in range(2):
    reference.zero_grad()
    local.drop()
    for micro_step in range(2):
        rows = torch.randn(16, 6)
        loss_of(reference, rows, micro_step).backward()
        sent = backend.send_rows(rows, 16)
        with local.micro_step(sync_gradients=micro_step == 1):
            loss_of(model, backend.manual_sharding.full_to_shard(sent, by_rows=True), micro_step).backward()
        backend.wait()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(backend.fetch(parameter.grad), expected.grad, rtol=1e-4, atol=1e-4, msg=name)
"""

CHECKS = {
    "sums of the whole batch": SUMS_OF_THE_WHOLE_BATCH,
    "a dropout of each chip": A_DROPOUT_OF_EACH_CHIP,
    "a parameter that is left out": A_PARAMETER_THAT_THE_LAST_MICRO_STEP_LEAVES_OUT,
}
RUN_ALL = """
import json, sys, traceback

failed = {}
for name, check in json.load(sys.stdin).items():
    try:
        exec(check, dict(globals()))
    except Exception:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failed():
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    result = forked.run(
        [sys.executable, "-c", PREPARE + RUN_ALL],
        env=env,
        input=json.dumps(CHECKS),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_chips(failed, name):
    assert name not in failed, failed[name]
