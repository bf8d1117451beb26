"""Builds a cache and says where it is, waiting for an answer there, so that `test_cache_kill.py` can kill it at any point."""

import json
import os
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from hf_tpu_ext import atomic_write
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.data import StaticShapeCollator
from hf_tpu_ext.distillation import cache_writer
from hf_tpu_ext.distillation.cache_builder import Sequences, TeacherRun, build_cache
from hf_tpu_ext.distillation.cache_format import CacheSettings, chat_template_hash, tokenizer_hash
from hf_tpu_ext.distillation.cache_writer import CacheWriter
from hf_tpu_ext.layers.static_kernels import use_static_kernels
from hf_tpu_ext.temporarily import temporarily


def make_teacher(model_dir, backend, rows=4):
    """The tiny teacher on a backend, in two static lengths."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    use_static_kernels(model)
    add_fused_lm_head(model)
    collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=0), [16, 24], pad_token_id=0)
    return TeacherRun(backend.place(model), backend, collator, rows, pad_token_id=0)


def make_writer(directory, model_dir, dataset, overwrite=False, sequences_per_shard=8, **changes):
    """The sequences of a dataset and the writer of their cache."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    sequences = Sequences([dataset])
    settings = {
        "teacher": "tiny",
        "teacher_hash": "0",
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "chat_template_hash": chat_template_hash(tokenizer),
        "vocab_size": len(tokenizer),
        "top_k": 16,
        "temperatures": (1.0, 2.0),
        "max_length": 24,
        "compute_dtype": "float32",
        "dataset_hash": sequences.hash,
        "sequences": len(sequences.keys),
        "tokens": sum(sequences.lengths),
    }
    settings = CacheSettings(**{**settings, **changes})
    with temporarily(cache_writer, _MOST_SEQUENCES=sequences_per_shard):
        return sequences, CacheWriter(directory, settings, sequences.keys, sequences.lengths, overwrite)


class _SaysWhereItIs:
    """Stands in for the module `os` in the writer, and says what it is about to do."""

    def __init__(self, reach):
        self._reach = reach

    def __getattr__(self, name):
        return getattr(os, name)

    def replace(self, source, target):
        name = target.name
        if name == "manifest.json":
            # It is written after each file.
            name += f" of {len(json.loads(source.read_text())['shards'])} files"
        self._reach(f"rename to {name}")
        os.replace(source, target)
        self._reach(f"renamed to {name}")


def build(model_dir, rows_dir, directory, reach):
    """
    Build a cache.

    Args:
        model_dir (`str` or `Path`):
            Directory of the teacher.
        rows_dir (`str` or `Path`):
            Directory of the saved dataset.
        directory (`str` or `Path`):
            Directory of the cache.
        reach (`Callable`):
            Called with what is about to be done.
    """
    teacher = make_teacher(model_dir, select_backend("xla"))
    atomic_write.os = _SaysWhereItIs(reach)
    try:
        sequences, writer = make_writer(directory, model_dir, Dataset.load_from_disk(rows_dir), sequences_per_shard=4)
        make_batch = teacher.batch

        def batch(chosen):
            reach(f"batch with {chosen[0]}")
            return make_batch(chosen)

        teacher.batch = batch
        build_cache(teacher, sequences, writer, quiet=True)
    finally:
        atomic_write.os = os


def _say_and_wait(moment):
    print(f"reached {moment}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    build(*sys.argv[1:], _say_and_wait)
