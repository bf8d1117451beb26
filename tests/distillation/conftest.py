"""A tiny teacher, prepared rows, and caches made from them."""

import numpy as np
import pytest
import torch
from cache_driver import make_teacher, make_writer
from datasets import Dataset

from hf_tpu_ext.distillation.cache_builder import build_cache
from hf_tpu_ext.examples.tiny import make_model


@pytest.fixture(scope="session")
def tiny_teacher(tmp_path_factory):
    """Directory of a tiny Qwen3 with its tokenizer."""
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=32, intermediate_size=48)


@pytest.fixture(scope="session")
def rows():
    """A prepared dataset of 26 rows, two of which are the same."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 250, rng.integers(2, 24)).tolist() for _ in range(25)]
    return Dataset.from_dict({"input_ids": [*sequences, sequences[4]]})


@pytest.fixture(scope="session")
def make_cache(xla, tiny_teacher, rows):
    """Builds a cache of the rows, on XLA by default."""

    def make(directory, dataset=None, backend=xla, **settings):
        teacher = make_teacher(tiny_teacher, backend)
        sequences, writer = make_writer(directory, tiny_teacher, dataset or rows, **settings)
        return build_cache(teacher, sequences, writer, quiet=True)

    return make


@pytest.fixture(scope="session")
def teacher_logits(tiny_teacher):
    """The teacher's logits on a sequence, in float64, by plain PyTorch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_teacher, dtype=torch.float64)

    @torch.no_grad()
    def logits(input_ids):
        return model(torch.tensor([list(input_ids)])).logits[0]

    return logits
