"""Numbers that follow from a seed: of the right distribution, each by itself, and the same wherever they are computed."""

import math

import pytest
import torch
import torch_xla
from torch import nn
from torch.nn import functional

from hf_tpu_ext.layers.random_numbers import DRAWS, RandomNumbers, RandomSeeds, gumbel, scramble


SHAPE = (16, 64, 96)


def seed(number):
    return torch.tensor(number, dtype=torch.int32)


def kept(number, p=0.3, shape=SHAPE, **kwargs):
    return (RandomNumbers(seed(number), **kwargs).drop(torch.ones(shape), p) != 0).float()


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_share_of_what_is_kept(p):
    share = kept(7, p)
    # Five standard deviations.
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = share.numel() / share.mean(dims).numel()
        assert ((share.mean(dims) - (1 - p)).abs() < 5 * (p * (1 - p) / count) ** 0.5).all()


def test_elements_and_seeds_know_nothing_of_one_another():
    first = kept(7)
    others = [kept(8), kept(-7), kept(7 + 2**16), *(first.roll(by, dim) for dim in range(3) for by in (1, 2, 7))]
    correlations = torch.corrcoef(torch.stack([first.flatten(), *(other.flatten() for other in others)]))[0, 1:]
    assert (correlations.abs() < 5 / first.numel() ** 0.5).all()


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_rows_and_columns_know_nothing_of_one_another(p):
    """Each element follows from a number of its row and one of its column: neither is to show in what is kept."""
    share = (kept(11, p, (1024, 1024)).double() - (1 - p)) / (p * (1 - p)) ** 0.5
    for mask in (share, share.T):
        size = len(mask)
        sums = mask.sum(1) / size**0.5
        # The variance of normal numbers has that of 2 / n.
        assert abs(sums.var() - 1) < 5 * (2 / size) ** 0.5
        pairs = (mask @ mask.T / size**0.5)[*torch.triu_indices(size, size, 1)]
        assert abs(pairs.mean()) < 5 / len(pairs) ** 0.5
        assert abs(pairs.var() - 1) < 0.02
    corners = share[:-1, :-1] * share[1:, :-1] * share[:-1, 1:] * share[1:, 1:]
    assert abs(corners.mean()) < 5 / corners.numel() ** 0.5


def test_rows_of_a_chip_are_those_of_the_whole():
    whole = kept(3)
    for chip in range(4):
        own = kept(3, shape=(4, *SHAPE[1:]), chip=seed(chip))
        assert torch.equal(own, whole[4 * chip :][:4])


def test_xla_drops_the_same(xla):
    torch.manual_seed(0)
    tensor = torch.randn(SHAPE)
    sent = xla.send({"tensor": tensor, "seed": seed(5)})
    with RandomNumbers(sent["seed"]):
        found = xla.fetch(functional.dropout(sent["tensor"], 0.1))
    torch.testing.assert_close(found, RandomNumbers(seed(5)).drop(tensor, 0.1), rtol=1e-6, atol=0)


def test_dropout_has_no_numbers_of_64_bits(xla):
    """Which the compiler for TPU makes of several of 32."""
    seed = torch.zeros((), dtype=torch.int32, device=xla.device)
    dropped = RandomNumbers(seed).drop(torch.ones(8, 128, device=xla.device), 0.05)
    assert "64[" not in torch_xla._XLAC._get_xla_tensors_hlo([dropped])


@pytest.mark.parametrize("p", [1e-12, 1 - 1e-12])
def test_nearly_nothing_and_nearly_all_are_dropped(p):
    dropped = RandomNumbers(torch.zeros((), dtype=torch.int32)).drop(torch.ones(64, 64), p)
    assert (dropped > 0).float().mean() == round(1 - p)


def test_gradients_are_those_of_dropout():
    tensor = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    output = RandomNumbers(seed(1)).drop(tensor, 0.2)
    output.sum().backward()
    mask = (output != 0).double() / 0.8
    torch.testing.assert_close(output, tensor * mask)
    torch.testing.assert_close(tensor.grad, mask)


def draw(xla, make, number=3, **kwargs):
    """What is made within a context of a seed on the device, which draws nothing from the device's own generator."""
    sent = xla.send(seed(number))
    before = xla.rng_state()
    with RandomNumbers(sent, **kwargs):
        found = make(xla.device)
    assert xla.rng_state() == before
    return xla.fetch(found)


def ones(device):
    return torch.ones(64, 1000, device=device)


# What draws, and the mean, the variance and the bounds of it.
DISTRIBUTIONS = {
    "rand": (lambda d: torch.rand(64, 1000, device=d), 0.5, 1 / 12, (0, 1)),
    "rand_like": (lambda d: torch.rand_like(ones(d)), 0.5, 1 / 12, (0, 1)),
    "uniform_": (lambda d: ones(d).uniform_(-1, 3), 1, 16 / 12, (-1, 3)),
    "randn": (lambda d: torch.randn(64, 1000, device=d), 0, 1, (-8, 8)),
    "randn_like": (lambda d: torch.randn_like(ones(d)), 0, 1, (-8, 8)),
    "normal_": (lambda d: ones(d).normal_(2, 3), 2, 9, (-22, 26)),
    "exponential_": (lambda d: ones(d).exponential_(2), 0.5, 0.25, (0, 12)),
    "bernoulli": (lambda d: torch.bernoulli(ones(d) * 0.3), 0.3, 0.21, (0, 1)),
    "bernoulli_": (lambda d: ones(d).bernoulli_(0.3), 0.3, 0.21, (0, 1)),
    "randint": (lambda d: torch.randint(10, (64, 1000), device=d), 4.5, 99 / 12, (0, 9)),
    "randint, low": (lambda d: torch.randint(low=5, high=15, size=(64, 1000), device=d), 9.5, 99 / 12, (5, 14)),
    "randint_like": (lambda d: torch.randint_like(ones(d), 0, 10), 4.5, 99 / 12, (0, 9)),
    "dropout": (lambda d: functional.dropout(ones(d), 0.2), 1, 0.25, (0, 1.25)),
    "Dropout in place": (lambda d: nn.Dropout(0.2, inplace=True)(ones(d)), 1, 0.25, (0, 1.25)),
    "torch.dropout": (lambda d: torch.dropout(ones(d), 0.2, True), 1, 0.25, (0, 1.25)),
    "torch.dropout_": (lambda d: torch.dropout_(ones(d), 0.2, True), 1, 0.25, (0, 1.25)),
}


@pytest.mark.parametrize("make, mean, variance, bounds", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_distributions_of_pytorchs_operators(xla, make, mean, variance, bounds):
    found = draw(xla, make).double()
    assert found.shape == (64, 1000)
    # Five standard deviations of the mean of as many; of the variance, with the fourth moment of an exponential one.
    assert abs(found.mean() - mean) < 5 * (variance / found.numel()) ** 0.5
    assert abs(found.var() - variance) < 5 * variance * (9 / found.numel()) ** 0.5
    assert bounds[0] <= found.min() and found.max() <= bounds[1]
    assert torch.equal(draw(xla, make).double(), found)
    assert not torch.equal(draw(xla, make, number=4).double(), found)


def test_all_that_draws_is_tested():
    names = " ".join(DISTRIBUTIONS)
    assert {name for _, name, _ in DRAWS} - {"scaled_dot_product_attention"} <= set(
        names.replace(",", " ").replace(".", " ").split()
    )


def test_the_dtype_and_gradients_are_those_asked_for(xla):
    def make(device):
        return torch.rand(4, 5, device=device, dtype=torch.bfloat16, requires_grad=True)

    sent = xla.send(seed(1))
    with RandomNumbers(sent):
        made = make(xla.device)
        whole, none = torch.randint(3, (), device=xla.device), torch.rand(0, 3, device=xla.device)
    assert (made.dtype, made.requires_grad, whole.dtype, whole.shape) == (torch.bfloat16, True, torch.int64, ())
    assert none.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_from_0_to_1_are_below_1_in_any_dtype(xla, dtype):
    sent = xla.send(seed(2))
    with RandomNumbers(sent):
        drawn = xla.fetch(torch.rand(100_000, device=xla.device, dtype=dtype))
    assert drawn.max() < 1 and abs(drawn.double().mean() - 0.5) < 0.01


@pytest.mark.parametrize(("low", "high"), [(2**24 + 1, 2**24 + 3), (10**9, 10**9 + 10), (0, 2**31), (-(2**30), 2**30)])
def test_integers_of_any_size(xla, low, high):
    sent = xla.send(seed(3))
    with RandomNumbers(sent):
        drawn = xla.fetch(torch.randint(low, high, (20_000,), device=xla.device))
    assert low <= drawn.min() and drawn.max() < high
    assert abs((drawn % 2).double().mean() - 0.5) < 0.02
    assert abs((drawn.double().mean() - low) / (high - 1 - low) - 0.5) < 0.02


def test_arguments_by_their_names(xla):
    sent, ones = xla.send([seed(4), torch.ones(3, 64)])
    with RandomNumbers(sent):
        for tensor in (torch.ones(3, 64), ones):
            device = tensor.device
            drawn = [
                torch.randint(0, 10, (3,), generator=None, device=device),
                torch.randint(5, high=10, size=(3,), device=device),
                torch.randint(high=10, size=(3,), device=device),
                torch.randint_like(tensor, 10),
                torch.randint_like(tensor, 5, high=10),
                torch.dropout(tensor, p=0.5, train=True),
            ]
            assert all(0 <= each.min() and each.max() < 10 for each in xla.fetch(drawn))


def test_a_function_that_was_taken_within_a_context_draws_after_it(xla):
    """As by a module that is imported in a forward pass."""
    sent = xla.send(seed(5))
    with RandomNumbers(sent):
        taken = functional.dropout
    assert taken(torch.ones(8), 0.5).shape == (8,)


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"enable_gqa": True}, {"scale": 0.3}], ids=str)
def test_dropout_of_attention(xla, settings):
    """With values that are the identity, attention returns its probabilities, some of which are dropped."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 32, 16), torch.randn(2, 4 if "enable_gqa" not in settings else 2, 32, 16)
    value = torch.eye(32).expand(2, key.shape[1], 32, 32)
    mask = None if settings.get("is_causal") else torch.rand(2, 1, 32, 32) < 0.9
    expected = functional.scaled_dot_product_attention(query, key, value, mask, **settings)
    sent = xla.send([query, key, value] + ([] if mask is None else [mask]))
    found = draw(xla, lambda _: functional.scaled_dot_product_attention(*sent, dropout_p=0.25, **settings))
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / 0.75, rtol=1e-5, atol=1e-6)
    assert abs(kept.float().sum() / (expected != 0).sum() - 0.75) < 0.03


def test_the_host_and_generators_draw_as_they_do(xla):
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    whole = torch.randint(9, (4,)), torch.rand(2), functional.dropout(torch.ones(8))
    sent = xla.send(seed(1))
    with RandomNumbers(sent):
        assert torch.equal(torch.rand(3, generator=generator), expected)
        torch.manual_seed(5)
        found = torch.randint(9, (4,)), torch.rand(2), functional.dropout(torch.ones(8))
    assert all(map(torch.equal, found, whole))


def test_pytorchs_functions_are_as_they_were(xla):
    before = {(owner, name): vars(owner).get(name) for owner, name, _ in DRAWS}
    sent = xla.send(seed(1))
    with pytest.raises(ZeroDivisionError), RandomNumbers(sent), RandomNumbers(sent):
        raise ZeroDivisionError
    assert before == {(owner, name): vars(owner).get(name) for owner, name, _ in DRAWS}


def test_each_draw_is_another_and_the_same_from_the_same_number_on(xla):
    sent, tensor = xla.send([seed(1), torch.ones(SHAPE)])
    with RandomNumbers(sent) as numbers:
        first, drawn, second = functional.dropout(tensor), numbers.num_draws, functional.dropout(tensor)
    with RandomNumbers(sent, num_draws=drawn):
        again = functional.dropout(tensor)
    first, second, again = xla.fetch([first, second, again])
    assert torch.equal(second, again) and not torch.equal(first, second)


def test_seeds_of_steps_are_others_and_leave_out_what_is_beside():
    seeds, others = RandomSeeds(7), RandomSeeds(7)
    found = []
    for _ in range(50):
        found.append(seeds.next().item())
        beside = [seeds.beside(number).item() for number in range(20)]
        assert found[-1] == others.next().item()
        found += beside
    assert len(set(found)) == len(found)
    resumed = RandomSeeds(7)
    resumed.count = seeds.count
    assert resumed.next() == seeds.next() != RandomSeeds(8).next()


@pytest.mark.ci
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
