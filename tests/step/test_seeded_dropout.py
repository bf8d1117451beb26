"""Masks that follow from a seed: as many are kept as asked for, each by itself, and the same wherever they are computed."""

import pytest
import torch
from torch import nn

from hf_tpu_ext.step.seeded_dropout import dropouts_seeded, seeded_dropout


SHAPE = (16, 64, 96)


def seed(number):
    return torch.tensor(number, dtype=torch.int32)


def kept(number, p=0.3, shape=SHAPE, **kwargs):
    return (seeded_dropout(torch.ones(shape), p, seed(number), **kwargs) != 0).float()


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
    found = xla.fetch(seeded_dropout(sent["tensor"], 0.1, sent["seed"]))
    torch.testing.assert_close(found, seeded_dropout(tensor, 0.1, seed(5)), rtol=1e-6, atol=0)


def test_gradients_are_those_of_dropout():
    tensor = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    output = seeded_dropout(tensor, 0.2, seed(1))
    output.sum().backward()
    mask = (output != 0).double() / 0.8
    torch.testing.assert_close(output, tensor * mask)
    torch.testing.assert_close(tensor.grad, mask)


def test_modules_drop_by_the_seed_and_only_in_training():
    modules = [nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5).eval()]
    ones = torch.ones(SHAPE)
    with dropouts_seeded(modules, seed(1), seed(0)):
        first, second, evaluated = (module(ones) for module in modules)
    with dropouts_seeded(modules, seed(1), seed(0)):
        assert torch.equal(modules[0](ones), first)
    assert not torch.equal(first, second)
    assert torch.equal(evaluated, ones)
    assert not any("forward" in vars(module) for module in modules)
