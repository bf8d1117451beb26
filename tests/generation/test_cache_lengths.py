"""A cache that grows while tokens are generated, where a token reads more of it than of the weights."""

import pytest
import torch
from test_generator import GREEDY, PROMPTS, generate_eagerly, make, place, stacked
from torch import nn
from transformers import GenerationConfig

from hf_tpu_ext.generation import Generator, cache_lengths
from hf_tpu_ext.generation.cache_lengths import choose_cache_lengths


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
    monkeypatch.setattr(cache_lengths, "MULTIPLE", 8)
    monkeypatch.setattr(cache_lengths, "LEAST", 2)


# The number of rows has the cache larger than the weights.
MANY = [prompt[::step] for prompt in PROMPTS for step in (1, -1, 2, -2)] * 4


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
