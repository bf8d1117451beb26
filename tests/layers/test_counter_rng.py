"""Random numbers by a hash: their distribution, and above all its tail."""

import math

import pytest
import torch

from hf_tpu_ext.layers.counter_rng import gumbel, scramble


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_gumbel_noise_follows_its_distribution(device, request):
    """Counts beyond quantiles, of 60 million numbers: the noise of 1,200 tokens chosen from a vocabulary of 50,000."""
    if device == "xla":
        request.getfixturevalue("xla")
    points = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0, 12.0, 14.0])
    above, total = torch.zeros(len(points)), 0
    for seed in range(12):
        noise = gumbel((100, 50_000), scramble(torch.tensor(seed, dtype=torch.int32, device=device))).cpu()
        assert noise.isfinite().all()
        above += torch.stack([(noise > point).sum() for point in points])
        total += noise.numel()
    for point, count in zip(points.tolist(), above.tolist(), strict=True):
        portion = -math.expm1(-math.exp(-point))
        deviation = math.sqrt(total * portion * (1 - portion))
        assert abs(count - total * portion) < 4 * deviation, point


def test_numbers_differ_between_places_and_seeds():
    first, other = (gumbel((64, 256), scramble(torch.tensor(seed, dtype=torch.int32))) for seed in (0, 1))
    # Some are the same, of 31 bits.
    assert len(first.unique()) > 0.999 * first.numel()
    assert first.max() < 16 and other.max() < 16
    for one, another in ((first, other), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        # The correlation of as many independent pairs has this deviation.
        correlation = torch.corrcoef(torch.stack([one.flatten(), another.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(one.numel())
