"""What torch_xla tells about compiles, programs and reads."""

import os

import pytest
import torch

from hf_tpu_ext.backends.insight import Insight
from hf_tpu_ext.backends.xla.insight import _record_compiles


def compiles_here(tensor):
    return (tensor * 1.25).sum().item()


def test_the_line_that_compiles(xla):
    tensor = xla.send(torch.ones(3, 41))
    xla.insight.compile_sites()
    compiles_here(tensor)
    (frames,) = xla.insight.compile_sites()
    assert (os.path.basename(frames[0].file), frames[0].function) == ("test_xla_insight.py", "compiles_here")
    compiles_here(tensor)
    assert xla.insight.compile_sites() == []


def test_the_operations_of_a_program(xla):
    tensor = xla.send(torch.ones(4, 43))
    xla.insight.note_lines(True)
    result = tensor[:, :5].clamp(max=1.0)
    xla.insight.note_lines(False)
    before = xla.counters()
    read = xla.insight.operations([tensor, result])
    spent = xla.counters() - before
    assert (spent.compiles, spent.executions, spent.reads) == (0, 0, 0)
    operations = read()
    (cut,) = [operation for operation in operations if operation.name == "slice"]
    assert (cut.shape, cut.details) == ("f32[4,5]", "slice={[0:4], [0:5]}")
    assert os.path.basename(cut.place.file) == "test_xla_insight.py"
    assert [operation.details for operation in operations if operation.name == "constant"] == ["1"]
    # Listing it has not run it, and lines are no part of it.
    assert torch.equal(xla.fetch(result), torch.ones(4, 5))
    compiles = xla.compiles()
    xla.fetch(tensor[:, :5].clamp(max=1.0))
    assert xla.compiles() == compiles


@pytest.mark.parametrize(
    "act, reads",
    [
        (lambda tensor: tensor.sum().item(), True),
        (lambda tensor: tensor.cpu(), True),
        (lambda tensor: tensor.tolist(), True),
        (lambda tensor: bool(tensor.sum() > 0), True),
        (lambda tensor: repr(tensor), True),
        (lambda tensor: torch.zeros(5).copy_(tensor), True),
        (lambda tensor: torch.histc(tensor), True),
        (lambda tensor: tensor.to(torch.bfloat16), False),
        (lambda tensor: torch.zeros(5).to(tensor.device), False),
        (lambda tensor: tensor.shape, False),
        (lambda tensor: torch.ones(5, device="xla", requires_grad=True).mul(tensor).sum().backward(), False),
    ],
    ids=["item", "cpu", "tolist", "if", "print", "copy", "host", "dtype", "send", "shape", "backward"],
)
def test_what_reads(xla, act, reads):
    tensor = xla.send(torch.arange(5.0))
    stray, before = xla.insight.stray_reads(), xla.insight.traffic()
    result = act(tensor)
    assert xla.insight.has_read(before, result) == reads
    assert xla.insight.stray_reads() - stray == int(reads)


def test_fetches_are_meant_to_be(xla):
    tensor = xla.send(torch.arange(6.0))
    stray, reads = xla.insight.stray_reads(), xla.counters().reads
    xla.fetch({"a": tensor, "b": tensor * 2})
    assert xla.insight.stray_reads() == stray and xla.counters().reads == reads + 1


def test_a_number_that_is_read_is_no_operator_on_the_host(xla):
    tensor = xla.send(torch.arange(7.0))
    before = xla.counters()
    tensor.sum().item()
    assert (xla.counters() - before).fallbacks == 0
    torch.histc(tensor)
    assert (xla.counters() - before).fallbacks == 1


def test_settings_of_who_debugs_are_left_alone(monkeypatch):
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "2")
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", "/somewhere/debug.txt")
    assert _record_compiles.__wrapped__() == "/somewhere/debug.txt"
    assert os.environ["PT_XLA_DEBUG_LEVEL"] == "2"


def test_a_process_that_is_started_makes_its_own_record(monkeypatch):
    for name in ("PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG_FILE", "PT_XLA_DEBUG_MAX_FRAME"):
        monkeypatch.delenv(name, raising=False)
    first = _record_compiles.__wrapped__()
    assert os.environ["PT_XLA_DEBUG_FILE"] == first
    assert _record_compiles.__wrapped__() not in (None, first)


def test_an_eager_device_has_nothing_to_tell():
    insight = Insight()
    with insight.own_reads():
        assert insight.stray_reads() == 0
    assert (insight.compile_sites(), insight.operations([]), insight.operators_on_host()) == ([], None, {})
    assert not insight.has_read(insight.traffic(), 1.0)
