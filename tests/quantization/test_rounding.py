"""Rounding has torchao's bits, and its gradients."""

import pytest
import torch

from hf_tpu_ext.quantization.rounding import SCALES, WEIGHT_DTYPES, Rounding


qat = pytest.importorskip("torchao.quantization.qat")


def draw(*shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    # A group of zeros, an outlier, and values that lie half way between two integers.
    values.view(-1)[:32] = 0
    values.view(-1)[40] = 30
    values.view(-1)[64:80] = torch.arange(-8, 8) + 0.5
    return values


def gradient(round_, values, direction):
    values = values.clone().requires_grad_()
    output = round_(values)
    output.backward(direction)
    return output.detach(), values.grad


@pytest.mark.parametrize("group_size", [16, 32, 96])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_weights(dtype, group_size):
    theirs = qat.IntxFakeQuantizer(qat.IntxFakeQuantizeConfig(getattr(torch, dtype), group_size=group_size))
    ours = Rounding(int(dtype[3:]), group_size).round_weight
    weight, direction = draw(24, 96), torch.randn(24, 96)
    (expected, its_gradient), (found, gradient_) = (gradient(each, weight, direction) for each in (theirs, ours))
    assert torch.equal(found, expected)
    integers, scales = Rounding(int(dtype[3:]), group_size).quantize_weight(weight)
    assert torch.equal((integers.unflatten(1, (-1, group_size)) * scales[..., None]).flatten(1), found)
    torch.testing.assert_close(gradient_, its_gradient, rtol=1e-6, atol=0)
    # Straight through, but for what was clamped.
    assert set(torch.unique(gradient_ / direction).tolist()) == {0.0, 1.0}


def test_activations():
    config = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    ours = Rounding(4, 32, activations=True).round_activation
    for hidden in (draw(2, 5, 96), draw(2, 5, 96).abs(), -draw(2, 5, 96).abs() - 1):
        direction = torch.randn(hidden.shape)
        expected, its_gradient = gradient(qat.IntxFakeQuantizer(config), hidden, direction)
        found, gradient_ = gradient(ours, hidden, direction)
        assert torch.equal(found, expected)
        torch.testing.assert_close(gradient_, its_gradient, rtol=1e-6, atol=0)


def test_bfloat16_is_rounded_as_the_same_numbers_in_float32_are():
    rounding, values = Rounding(8, 32, activations=True), draw(4, 96).bfloat16()
    assert torch.equal(rounding.round_weight(values), rounding.round_weight(values.float()))
    assert torch.equal(rounding.round_activation(values), rounding.round_activation(values.float()).bfloat16())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_same_bits_on_xla(xla, bits, scale):
    rounding, values = Rounding(bits, 32, activations=True, scale=scale), draw(8, 96)
    on_device = values.to(xla.device)
    found = xla.fetch([rounding.round_weight(on_device), rounding.round_activation(on_device)])
    assert torch.equal(found[0], rounding.round_weight(values))
    assert torch.equal(found[1], rounding.round_activation(values))


def searched_in_float64(group, bits, ranges):
    """Of a group the integers of the least squared error, and their scale: the best of all ranges, either way around."""
    lowest, best = -(2 ** (bits - 1)), None
    for largest in (group.max(), group.min()):
        for range_ in ranges:
            integers = (group * lowest / (range_ * largest)).round().clamp(lowest, -lowest - 1)
            scale = (group @ integers) / (integers @ integers)
            error = (group - scale * integers).square().sum()
            if best is None or error < best[0]:
                best = error, integers, scale
    return best


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_searched_scales_have_nearly_the_least_error(bits):
    weight, rounding = torch.randn(32, 96), Rounding(bits, 32, scale="mse")
    least = sum(
        searched_in_float64(group, bits, torch.linspace(0.4, 1.2, 81).tolist())[0]
        for group in weight.double().view(-1, 32)
    )
    found, largest = (
        (each.round_weight(weight) - weight).double().square().sum() for each in (rounding, Rounding(bits, 32))
    )
    assert least <= found < 1.06 * least < 0.85 * largest


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_searched_scale_is_the_least_squares_fit_of_the_best_range(bits):
    weight = torch.randn(1, 32) + 0.3
    weight[0, 5] = 4.0
    _, scale = Rounding(bits, 32, scale="mse").quantize_weight(weight)
    # The largest weight, which is positive, becomes the lowest integer.
    _, _, expected = searched_in_float64(weight[0].double(), bits, (1.0, 0.9, 0.8, 0.7))
    assert expected < 0
    torch.testing.assert_close(scale[0, 0].double(), expected, rtol=2**-8, atol=0)


def test_searched_scales_are_exact_in_bfloat16_and_straight_through():
    weight, direction = draw(24, 96), torch.randn(24, 96)
    rounding = Rounding(3, 32, scale="mse")
    found, gradient_ = gradient(rounding.round_weight, weight, direction)
    integers, scales = rounding.quantize_weight(weight)
    assert torch.equal(scales.bfloat16().float(), scales) and (scales < 0).any() and (scales > 0).any()
    groups = integers.unflatten(1, (-1, 32))
    assert torch.equal((groups * scales[..., None]).flatten(1), found)
    assert torch.equal(found[0, :32], torch.zeros(32))
    unclamped = torch.round(weight.unflatten(1, (-1, 32)) / scales[..., None])
    assert torch.equal(
        gradient_,
        torch.where((unclamped.abs() <= 3) | (unclamped == -4), direction.unflatten(1, (-1, 32)), 0.0).flatten(1),
    )
    # Powers of two change no integer: the scales are those of the weights that are given.
    assert torch.equal(rounding.round_weight(2 * weight), 2 * found)
