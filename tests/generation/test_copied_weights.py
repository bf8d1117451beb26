"""Weights that decoding reads from copies: where there is room, in the form of each compiler, and always those of now."""

from contextlib import nullcontext

import pytest
import torch
from test_generator import GREEDY, PROMPTS, SIZES, generate_eagerly, make, place, stacked
from torch import nn
from transformers import GenerationConfig

from hf_tpu_ext.backends.xla.backend import XLABackend
from hf_tpu_ext.generation import copied_weights
from hf_tpu_ext.generation.copied_weights import CopiedWeights
from hf_tpu_ext.generation.generator import Generator


# Of a layer of Qwen2: seven matrices, three biases, two norms.
LINEAR, PARAMETERS, LAYERS = 7, 12, SIZES["num_hidden_layers"]


@pytest.fixture
def of_tpu(xla, monkeypatch):
    """A placed model with layers in a loop, and the host as if it were a TPU of 2**30 bytes."""
    model = stacked(xla)
    monkeypatch.setattr(xla.kernels, "platform", "tpu")
    monkeypatch.setattr(XLABackend, "memory_per_chip", 2**30)
    return model


def test_on_the_host_linear_layers_have_their_matrices_transposed(xla):
    # Layers in a loop come last.
    for model, count, head in (
        (place(make(), xla), LINEAR * LAYERS + 1, -1),
        (stacked(xla), PARAMETERS * LAYERS + 1, 0),
    ):
        copied = CopiedWeights(model, xla)
        assert len(copied) == count
        made = copied.make()
        assert torch.equal(xla.fetch(made[head]), xla.fetch(model.lm_head.weight).T)
        with copied.read(made):
            assert model.lm_head.weight.shape == (SIZES["vocab_size"], SIZES["hidden_size"])
            assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert model.lm_head.weight is model.get_output_embeddings().weight


def test_on_tpu_layers_of_a_loop_have_theirs_one_by_one(xla, of_tpu):
    assert len(CopiedWeights(make(), xla)) == 0
    copied = CopiedWeights(of_tpu, xla)
    made = xla.fetch(copied.make())
    assert len(copied) == len(made) == PARAMETERS * LAYERS
    parts = [part for parameter in xla.fetch(list(of_tpu.model.layers.tensors.values())) for part in parameter]
    assert all(map(torch.equal, made, parts))


def test_under_autocast_matrices_of_linear_layers_have_its_dtype(xla, of_tpu):
    with torch.autocast("xla", torch.bfloat16):
        made = CopiedWeights(of_tpu, xla).make()
    for (name, parameter), copy in zip(of_tpu.model.layers.tensors.items(), made[::LAYERS], strict=True):
        assert copy.dtype == (torch.bfloat16 if name.endswith("proj.weight") else torch.float32), name
        assert torch.equal(xla.fetch(copy), xla.fetch(parameter)[0].to(copy.dtype))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_text_is_the_same_on_tpu_too(xla, of_tpu, monkeypatch, dtype):
    generator = Generator(of_tpu, xla, GenerationConfig(**GREEDY), [8, 16])
    made = []
    for share in (0, 0.25):
        monkeypatch.setattr(copied_weights, "_MOST_MEMORY", share)
        with nullcontext() if dtype is None else torch.autocast("xla", dtype):
            made.append(generator.generate(PROMPTS))
        # The memory is free for training.
        assert generator.copied_weights() == []
    assert made[0] == made[1]
    if dtype is None:
        assert made[0].token_ids == generate_eagerly(make(), PROMPTS, **GREEDY)


def test_nothing_is_copied_without_room(xla, of_tpu, monkeypatch):
    needed = sum(parameter.nbytes for parameter in of_tpu.model.layers.tensors.values())
    for memory, count in ((4 * needed, PARAMETERS * LAYERS), (4 * needed - 1, 0), (None, 0)):
        monkeypatch.setattr(XLABackend, "memory_per_chip", memory)
        assert len(CopiedWeights(of_tpu, xla)) == count
    monkeypatch.setattr(xla.kernels, "platform", "cpu")
    monkeypatch.setattr(copied_weights, "_MOST_MEMORY", 0)
    assert len(CopiedWeights(of_tpu, xla)) == 0


def test_a_weight_that_is_computed_stays(xla):
    model, eager = make(), make()
    for each in (model, eager):
        nn.utils.parametrizations.weight_norm(each.model.layers[0].mlp.up_proj)
    model = place(model, xla)
    assert len(CopiedWeights(model, xla)) == LINEAR * LAYERS
    generator = Generator(model, xla, GenerationConfig(**GREEDY), [16])
    assert generator.generate(PROMPTS).token_ids == generate_eagerly(eager, PROMPTS, **GREEDY)
