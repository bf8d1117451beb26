"""How the teacher is run: once per batch, in few shapes, over each different sequence once; and the most likely tokens, chunk by chunk."""

import math
import re

import pytest
import torch
from cache_driver import make_teacher, make_writer
from transformers import AutoModelForCausalLM

from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.distillation import cache_builder
from hf_tpu_ext.distillation.cache_builder import Sequences, TeacherRows, build_cache, top_k_rows, weights_hash
from hf_tpu_ext.distillation.fused_head import Head


TEMPERATURES = (0.5, 1.0, 2.0, 4.0)


def test_one_program_per_shape_and_one_read_per_batch(xla, tiny_teacher, rows, tmp_path):
    teacher = make_teacher(tiny_teacher, xla, rows=2)
    shapes, before = [], xla.counters()
    make_batch = teacher.batch

    def batch(chosen):
        made = make_batch(chosen)
        shapes.append(tuple(made["input_ids"].shape))
        return made

    teacher.batch = batch
    sequences, writer = make_writer(tmp_path, tiny_teacher, rows, top_k=15)
    build_cache(teacher, sequences, writer, quiet=True)
    done = xla.counters() - before
    assert set(shapes) == {(2, 16), (2, 24)} and len(shapes) == 13
    # The weights were sent before the first of them.
    assert done.compiles == 2 and done.executions == 13
    assert done.reads == 13 and done.fallbacks == 0


def test_sequences_are_different_ones_in_order(rows):
    again = Sequences([rows, rows.select([3, 1])])
    assert len(again.keys) == 25 and again.hash == Sequences([rows]).hash
    assert [again[number] for number in range(25)] == rows["input_ids"][:25]
    assert again.lengths == [len(input_ids) for input_ids in rows["input_ids"][:25]]
    assert again.largest_id == max(map(max, rows["input_ids"]))
    assert Sequences([rows.select(range(24, -1, -1))]).hash != again.hash


def test_weights_hash_tells_trainings_apart(tiny_teacher):
    model = AutoModelForCausalLM.from_pretrained(tiny_teacher)
    first = weights_hash(model)
    assert weights_hash(AutoModelForCausalLM.from_pretrained(tiny_teacher)) == first
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    assert weights_hash(model) != first


def make_head(tokens=37, hidden_size=8, vocab_size=50, scale=3.0, **kwargs):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(vocab_size, hidden_size, generator=generator)
    return Head(hidden, weight, torch.randn(vocab_size, generator=generator), scale=scale, **kwargs)


def on(backend, head):
    tensors = backend.send({"hidden": head.hidden, "weight": head.weight, "bias": head.bias})
    return head._replace(**tensors)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("top_k", [1, 16, 50])
@pytest.mark.parametrize("name", ["xla", "cpu"])
def test_is_the_reference(xla, monkeypatch, name, top_k, softcap):
    # 37 tokens in chunks of at most 8.
    monkeypatch.setattr(cache_builder, "_CHUNK_ELEMENTS", 400)
    backend, head = select_backend(name), make_head(softcap=softcap)
    found = TeacherRows(*backend.fetch(tuple(top_k_rows(on(backend, head), top_k, TEMPERATURES, backend))))
    assert [value.dtype for value in found] == [torch.int32, torch.float16, torch.float32, torch.float16]

    double = head._replace(hidden=head.hidden.double(), weight=head.weight.double(), bias=head.bias.double())
    logits = double.logits(torch.float64)
    largest = logits.topk(top_k)
    assert torch.equal(found.ids.long(), largest.indices)
    values = largest.values - logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(found.values.double(), values, rtol=2**-11, atol=1e-5)
    for index, temperature in enumerate(TEMPERATURES):
        reference = (logits / temperature).log_softmax(-1)
        exact = values / temperature - found.normalisers[:, index, None].double()
        torch.testing.assert_close(exact, reference.gather(-1, largest.indices), rtol=1e-5, atol=1e-5)
        tail = reference.scatter(-1, largest.indices, -math.inf).logsumexp(-1)
        torch.testing.assert_close(found.log_tails[:, index].double(), tail, rtol=2**-11, atol=1e-5)


def test_tokens_that_are_never_said(xla):
    head = make_head()
    head.bias[7] = -math.inf
    found = top_k_rows(head, 50, TEMPERATURES, select_backend("cpu"))
    assert (found.ids[:, -1] == 7).all()
    assert found.values.isfinite().all() and found.normalisers.isfinite().all()
    assert (found.log_tails == -math.inf).all()


def test_sure_teacher(xla):
    """The mass of all other tokens is known where a difference to 1 would be rounding."""
    head = make_head(scale=40.0)
    found = top_k_rows(head, 1, (1.0,), select_backend("cpu"))
    logits = head._replace(hidden=head.hidden.double()).logits(torch.float64)
    tail = logits.log_softmax(-1).scatter(-1, found.ids.long(), -math.inf).logsumexp(-1)
    assert (tail < -20).any()
    torch.testing.assert_close(found.log_tails[:, 0].double(), tail, rtol=1e-3, atol=1e-2)


def test_no_logits_of_a_whole_batch(xla, monkeypatch):
    import torch_xla

    monkeypatch.setattr(cache_builder, "_CHUNK_ELEMENTS", 16 * 211)
    found = top_k_rows(on(xla, make_head(tokens=128, vocab_size=211)), 16, TEMPERATURES, xla)
    program = torch_xla._XLAC._get_xla_tensors_hlo(list(found))
    sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", program)}
    assert (16, 211) in sizes
    assert max(math.prod(size) for size in sizes) <= 16 * 211
