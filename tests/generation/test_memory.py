"""
Weights that decoding reads from copies: where there is room, in the form of each compiler, and always those of now. A cache that
grows while tokens are generated, where a token reads more of it than of the weights.
"""

from contextlib import nullcontext

import pytest
import torch
from test_generator import GREEDY, PROMPTS, SIZES, generate_eagerly, make, place, stacked
from torch import nn
from transformers import GenerationConfig

from hf_tpu_ext.backends.xla.backend import XLABackend
from hf_tpu_ext.generation import Generator, memory
from hf_tpu_ext.generation.memory import CopiedWeights, choose_cache_lengths


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
        made = copied.make()
        assert len(made) == count
        assert torch.equal(xla.fetch(made[head]), xla.fetch(model.lm_head.weight).T)
        with copied.read(made):
            assert model.lm_head.weight.shape == (SIZES["vocab_size"], SIZES["hidden_size"])
            assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert model.lm_head.weight is model.get_output_embeddings().weight


def test_on_tpu_layers_of_a_loop_have_theirs_one_by_one(xla, of_tpu):
    assert CopiedWeights(make(), xla).make() == []
    made = xla.fetch(CopiedWeights(of_tpu, xla).make())
    assert len(made) == PARAMETERS * LAYERS
    parts = [part for parameter in xla.fetch(list(of_tpu.model.layers.tensors.values())) for part in parameter]
    assert all(map(torch.equal, made, parts))


def test_under_autocast_matrices_of_linear_layers_have_its_dtype(xla, of_tpu):
    with torch.autocast("xla", torch.bfloat16):
        made = CopiedWeights(of_tpu, xla).make()
    for (name, parameter), copy in zip(of_tpu.model.layers.tensors.items(), made[::LAYERS], strict=True):
        assert copy.dtype == (torch.bfloat16 if name.endswith("proj.weight") else torch.float32), name
        assert torch.equal(xla.fetch(copy), xla.fetch(parameter)[0].to(copy.dtype))


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_text_is_the_same_on_tpu_too(xla, of_tpu, monkeypatch, dtype):
    generator = Generator(of_tpu, xla, GenerationConfig(**GREEDY), [8, 16])
    made = []
    for share in (0, 0.25):
        monkeypatch.setattr(memory, "_MOST_MEMORY", share)
        with nullcontext() if dtype is None else torch.autocast("xla", dtype):
            made.append(generator.generate(PROMPTS))
        # The memory is free for training.
        assert generator.copied_weights() == []
    assert made[0] == made[1]
    if dtype is None:
        assert made[0].token_ids == generate_eagerly(make(), PROMPTS, **GREEDY)


def test_nothing_is_copied_without_room(xla, of_tpu, monkeypatch):
    needed = sum(parameter.nbytes for parameter in of_tpu.model.layers.tensors.values())
    for num_bytes, count in ((4 * needed, PARAMETERS * LAYERS), (4 * needed - 1, 0), (None, 0)):
        monkeypatch.setattr(XLABackend, "memory_per_chip", num_bytes)
        assert len(CopiedWeights(of_tpu, xla).make()) == count
    monkeypatch.setattr(xla.kernels, "platform", "cpu")
    monkeypatch.setattr(memory, "_MOST_MEMORY", 0)
    assert CopiedWeights(of_tpu, xla).make() == []


def test_a_weight_that_is_computed_stays(xla):
    model, eager = make(), make()
    for each in (model, eager):
        nn.utils.parametrizations.weight_norm(each.model.layers[0].mlp.up_proj)
    model = place(model, xla)
    assert len(CopiedWeights(model, xla).make()) == LINEAR * LAYERS
    generator = Generator(model, xla, GenerationConfig(**GREEDY), [16])
    assert generator.generate(PROMPTS).token_ids == generate_eagerly(eager, PROMPTS, **GREEDY)


# ---- Lengths of the cache ----


@pytest.mark.parametrize(
    ("weights", "prompt", "new", "chips", "expected"),
    [
        # 64 elements of each position: 49,152 of 768.
        (50_000, 256, 512, 1, [768]),
        (49_000, 256, 512, 1, [384, 768]),
        (24_000, 256, 512, 1, [384, 768]),
        # Each chip has an eighth of the rows, and all weights.
        (24_000, 256, 512, 8, [768]),
        (100, 64, 2048, 1, [128, 256, 512, 1024, 2112]),
        (100, 32, 128, 1, [128, 160]),
        (100, 32, 512, 1, [128, 256, 544]),
        # Nothing is gained where a prompt has no room in half of it.
        (100, 100, 60, 1, [160]),
        (100, 8, 1, 1, [9]),
        (100, 100, 28, 1, [128]),
        (100, 100, 30, 1, [130]),
    ],
)
def test_lengths(weights, prompt, new, chips, expected):
    model = nn.Linear(weights, 1, bias=False)
    cache = [torch.empty(2, 2, prompt, 8), torch.empty(4, prompt, 8)]
    assert choose_cache_lengths(cache, model, prompt, new, chips, 2**30) == expected


def test_weights_count_as_they_are_read():
    """Those of floating dtypes in the dtype of the cache, and packed ones as they are."""
    cache, packed = [torch.empty(8, 256, 8, dtype=torch.bfloat16)], nn.Module()
    for count, dtype, expected in (
        (49_200, torch.float32, [768]),
        (49_100, torch.float32, [384, 768]),
        (24_600, torch.int32, [768]),
        (24_500, torch.int32, [384, 768]),
    ):
        packed.words = nn.Parameter(torch.empty(count, dtype=dtype), requires_grad=False)
        assert choose_cache_lengths(cache, packed, 256, 512, 1, 2**30) == expected


def test_a_shorter_cache_needs_room_beside_the_next():
    cache, model = [torch.empty(8, 64, 8)], nn.Linear(100, 1, bias=False)
    of_position = 4 * 64
    for room, expected in ((1024, [128, 256, 512, 1024, 2112]), (1023, [2112]), (0, [2112])):
        assert choose_cache_lengths(cache, model, 64, 2048, 1, room * of_position) == expected


@pytest.fixture
def short_lengths(monkeypatch):
    monkeypatch.setattr(memory, "MULTIPLE", 8)
    monkeypatch.setattr(memory, "LEAST", 2)


# The number of rows has the cache larger than the weights.
MANY = [prompt[::step] for prompt in PROMPTS for step in (1, -1, 2, -2)] * 4


@pytest.mark.ci
@pytest.mark.parametrize(
    "make_model",
    [place, pytest.param(lambda model, backend: stacked(backend), marks=pytest.mark.slow)],
    ids=["layers", "a loop"],
)
@pytest.mark.parametrize(
    "end", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ends", "to the full length"]
)
def test_tokens_of_a_growing_cache(xla, short_lengths, make_model, end):
    settings = {**GREEDY, "max_new_tokens": 86} | ({} if end else {"min_new_tokens": 86})
    expected = generate_eagerly(make(), MANY, **settings)
    model = make_model(make(), xla)
    generator = Generator(model, xla, GenerationConfig(**settings), [16])
    lengths = []
    generator._cache_lengths = lambda cache, choose=generator._cache_lengths: (
        lengths.append(choose(cache)) or lengths[-1]
    )
    assert generator.generate(MANY).token_ids == expected
    assert lengths == [[24, 48, 102]] * 2
    before = xla.counters()
    generator.generate(MANY[::-1])
    spent = xla.counters() - before
    assert (spent.compiles, spent.executions, spent.reads) == (0, 2, 1)


def test_log_probs_of_a_growing_cache(xla, short_lengths):
    # With larger weights, rounding alone moves log-probabilities by 2e-5, whatever the length of the cache.
    model, eager = place(make(initializer_range=0.1), xla), make(initializer_range=0.1).double()
    config = GenerationConfig(max_new_tokens=40, min_new_tokens=40, do_sample=True, repetition_penalty=1.2)
    made = Generator(model, xla, config, [16]).generate(MANY, seed=3)
    for prompt, tokens, log_probs in zip(MANY, made.token_ids, made.log_probs, strict=True):
        with torch.no_grad():
            logits = eager(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected, rtol=0, atol=1e-5)
