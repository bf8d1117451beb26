"""Tensors split over chips: sent once, read without being made whole on a chip, placed anew."""

import os
import sys

import forked
import pytest
import torch


SCRIPT = """
import torch
import torch_xla

from hf_tpu_ext.backends import select_backend

backend = select_backend("xla")
assert backend.num_chips == 8
backend.use_mesh({"data": 2, "fsdp": 4})


def parts(tensor):
    return [tuple(part.shape) for part, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]


# A batch: rows go to their chip, what is not a row to all, scalars are data.
batch = {
    "input_ids": torch.arange(48).reshape(16, 3),
    "weights": torch.rand(16),
    "table": torch.rand(5, 2),
    "scale": torch.tensor(1.0),
    "name": "not a tensor",
}
sent = backend.send_rows(batch, 16)
assert parts(sent["input_ids"]) == [(2, 3)] * 8 and parts(sent["weights"]) == [(2,)] * 8
assert parts(sent["table"]) == [(5, 2)] * 8 and parts(sent["scale"]) == [()] * 8
assert sent["name"] == "not a tensor"
backend.wait()
before = backend.counters()
fetched = backend.fetch(sent)
for key in ("input_ids", "weights", "table", "scale"):
    assert torch.equal(fetched[key], batch[key]), key
# Nothing was gathered on a chip: one read for what is whole, one for what is split.
spent = backend.counters() - before
assert (spent.compiles, spent.executions, spent.reads) == (0, 0, 2), spent
try:
    backend.send_rows(batch, 12)
except ValueError as error:
    assert "12 rows does not divide by 8 chips" in str(error), error
else:
    raise AssertionError("12 rows were split over 8 chips")

# A weight: split, computed with, placed otherwise, whole again; always the same values.
weight = torch.rand(16, 6)
placed = weight.to(backend.device)
for spec, shape in (("fsdp", None), (4, 6)), ((None, None), (16, 6)), ((("data", "fsdp"), None), (2, 6)):
    backend.shard(placed, spec)
    backend.wait()
    assert parts(placed) == [shape] * 8, (spec, parts(placed))
    placed.copy_(placed + 0)
    backend.wait()
    assert parts(placed) == [shape] * 8
    assert torch.equal(backend.fetch(placed), weight)
backend.shard(placed, (("data", "fsdp"), None))

# Each chip by itself, and back.
local = backend.manual_sharding.full_to_shard(placed, by_rows=True)
assert local.shape == (2, 6)
sums = backend.manual_sharding.shard_to_full(local.sum(0, keepdim=True))
assert sums.shape == (8, 6)
torch.testing.assert_close(backend.fetch(sums), weight.reshape(8, 2, 6).sum(1))
whole = backend.manual_sharding.full_to_shard(backend.send(torch.tensor(3.0)))
assert backend.fetch(backend.manual_sharding.shard_to_full((whole + 1).reshape(1))).tolist() == [4.0] * 8

# Activations, and their gradients, keep their rows; what does not divide is left alone.
rows = backend.send_rows(torch.ones(16, 3), 16).requires_grad_()
out = backend.constrain_rows(rows * 2)
out.sum().backward()
backend.wait()
assert parts(out) == parts(rows.grad) == [(2, 3)] * 8
odd = backend.send(torch.ones(3, 2))
assert backend.constrain_rows(odd) is odd
assert backend.memory_per_chip is None and "CPU" in backend.device_name
"""


@pytest.mark.slow
def test_eight_chips():
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    result = forked.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


def test_one_chip_has_no_mesh(xla):
    xla.use_mesh({"data": 1, "fsdp": 1})
    tensor = torch.ones(4, 2).to(xla.device)
    xla.shard(tensor, ("fsdp", None))
    assert xla.constrain_rows(tensor) is tensor
    assert xla.send_rows({"rows": torch.ones(3)}, 3)["rows"].tolist() == [1, 1, 1]
