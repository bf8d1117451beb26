"""Weights that decoding reads from copies: where there is room, in the form of each compiler, and always those of now."""

import pytest
import torch
from test_generator import GREEDY, PROMPTS, SIZES, generate_eagerly, make, place
from transformers import GenerationConfig

from hf_tpu_ext.backends.xla import XLABackend
from hf_tpu_ext.generation import copied_weights
from hf_tpu_ext.generation.copied_weights import CopiedWeights
from hf_tpu_ext.generation.generator import Generator
from hf_tpu_ext.step.layer_scan import LayerStack


# Of a layer of Qwen2: seven matrices, three biases, two norms.
LINEAR, PARAMETERS, LAYERS = 7, 12, SIZES["num_hidden_layers"]


def stacked(backend):
    model = place(make(), backend)
    stack = LayerStack(model.model.layers, backend, "full")
    stack.stack()
    model.model.layers = stack
    return model


@pytest.fixture
def of_tpu(xla, monkeypatch):
    """What is written as for a TPU of 2**30 bytes, on the host."""
    monkeypatch.setattr(xla.kernels, "platform", "tpu")
    monkeypatch.setattr(XLABackend, "memory_per_chip", 2**30)
    return xla


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


def test_on_tpu_layers_of_a_loop_have_theirs_one_by_one(of_tpu):
    assert len(CopiedWeights(place(make(), of_tpu), of_tpu)) == 0
    model = stacked(of_tpu)
    copied = CopiedWeights(model, of_tpu)
    made = of_tpu.fetch(copied.make())
    assert len(copied) == len(made) == PARAMETERS * LAYERS
    parts = [part for parameter in of_tpu.fetch(list(model.model.layers.stacked.values())) for part in parameter]
    assert all(map(torch.equal, made, parts))


def test_text_is_the_same_on_tpu_too(of_tpu):
    expected = generate_eagerly(make(), PROMPTS, **GREEDY)
    generator = Generator(stacked(of_tpu), of_tpu, GenerationConfig(**GREEDY), [8, 16])
    assert generator.generate(PROMPTS).token_ids == expected
    # The memory is free for training.
    assert generator.copied_weights() == []


def test_nothing_is_copied_without_room(xla, of_tpu, monkeypatch):
    model = stacked(of_tpu)
    needed = sum(parameter.nbytes for parameter in model.model.layers.stacked.values())
    for memory, count in ((4 * needed, PARAMETERS * LAYERS), (4 * needed - 1, 0), (None, 0)):
        monkeypatch.setattr(XLABackend, "memory_per_chip", memory)
        assert len(CopiedWeights(model, of_tpu)) == count
    monkeypatch.setattr(xla.kernels, "platform", "cpu")
    monkeypatch.setattr(copied_weights, "_MOST_MEMORY", 0)
    assert len(CopiedWeights(model, xla)) == 0
    generator = Generator(model, xla, GenerationConfig(**GREEDY), [16])
    assert generator.generate(PROMPTS).token_ids == generate_eagerly(make(), PROMPTS, **GREEDY)
