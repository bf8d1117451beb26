"""How the teacher is run: once per batch, in few shapes, and over each different sequence once."""

import torch
from cache_driver import make_teacher, make_writer
from transformers import AutoModelForCausalLM

from hf_tpu_ext.distillation.cache_builder import Sequences, build_cache, weights_hash


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
