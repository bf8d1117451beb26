"""Samples of the right distribution."""

import pytest
import torch
from test_generator import make, place
from transformers import GenerationConfig

from hf_tpu_ext.generation import Generator
from hf_tpu_ext.generation.sampling import Sampler


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=1.3),
        dict(top_k=4),
        dict(top_p=0.7),
        dict(min_p=0.2),
        dict(epsilon_cutoff=0.07, renormalize_logits=True),
        dict(top_k=6, top_p=0.8, temperature=0.6),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(xla, settings):
    """Counts of the first token of 4,096 rows, beside the probabilities of transformers' own processors."""
    model = make(vocab_size=12, initializer_range=0.1)
    model.generation_config.eos_token_id = None
    config = GenerationConfig(max_new_tokens=2, do_sample=True, pad_token_id=0, **{"top_k": 0, **settings})
    prompt = [3, 7, 1]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[:, -1]
    complete, _ = model._prepare_generation_config(config)
    processors = model._get_logits_processor(complete, input_ids_seq_length=3, logits_processor=[], device="cpu")
    expected = processors(torch.tensor([prompt]), logits).softmax(-1)[0]
    rows = 4096
    made = Generator(place(model, xla), xla, config, [3]).generate([prompt] * rows, seed=11).token_ids
    for place_of_token in (0, 1):
        counts = torch.bincount(torch.tensor([row[place_of_token] for row in made]), minlength=12)
        if place_of_token == 0:
            assert not counts[expected == 0].any()
            kept = expected > 0
            squares = (counts[kept] - rows * expected[kept]).square() / (rows * expected[kept])
            # The chi-squared statistic has a mean of the degrees of freedom, and this deviation: four of them are 1 in 10,000.
            freedom = kept.sum().item() - 1
            assert squares.sum().item() < freedom + 4 * (2 * freedom) ** 0.5 + 4
        # Rows are drawn each by itself.
        assert counts.max() < rows


@pytest.mark.slow
def test_unlikely_tokens_are_as_unlikely_in_a_large_vocabulary(xla):
    """2,048 choices among 50,000 tokens, all but one of them improbable."""
    model = make(vocab_size=50_000)
    config, _ = model._prepare_generation_config(GenerationConfig(do_sample=True, pad_token_id=0, top_k=0))
    sampler, rows, calls = Sampler(model, config, xla), 256, 8
    for unlikely in (-13.0, -20.0):
        logits = torch.full((rows, 50_000), unlikely)
        logits[:, 7] = 1.0
        expected = calls * rows * (1 - logits[0].double().softmax(-1)[7].item())
        found = 0
        for seed in range(calls):
            numbers = (torch.tensor(number, dtype=torch.int32).to(xla.device) for number in (seed, 0))
            tokens, _ = sampler.choose(logits.to(xla.device), *numbers, None)
            found += (tokens.cpu() != 7).sum().item()
        assert abs(found - expected) < 4 * expected**0.5 + 1
