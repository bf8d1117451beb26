"""Rounding has torchao's bits, and its gradients."""

import pytest
import torch

from hf_tpu_ext.quantization.rounding import WEIGHT_DTYPES, Rounding


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


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_same_bits_on_xla(xla, bits):
    rounding, values = Rounding(bits, 32, activations=True), draw(8, 96)
    on_device = values.to(xla.device)
    found = xla.fetch([rounding.round_weight(on_device), rounding.round_activation(on_device)])
    assert torch.equal(found[0], rounding.round_weight(values))
    assert torch.equal(found[1], rounding.round_activation(values))
