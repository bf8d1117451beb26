"""LoRA that scales between its factors computes what PEFT's does."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_tpu_ext.step.adapters import adapters_scaled_inside


def make(alpha=8, **settings):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 4))
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["0", "1"], init_lora_weights=False, **settings)
    return get_peft_model(base, config)


def outputs(model, dtype=None):
    """Output and gradients."""
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(x)
    model.zero_grad()
    output.float().square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_power_of_two_changes_no_bit(dtype):
    model = make(alpha=8)
    expected = outputs(model, dtype)
    with adapters_scaled_inside([model]):
        assert all(layer.lora_variant for layer in model.base_model.model)
        found = outputs(model, dtype)
    assert not any(layer.lora_variant for layer in model.base_model.model)
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs, ours)


def test_any_scaling():
    model = make(alpha=7)
    expected = outputs(model)
    with adapters_scaled_inside([model]):
        found = outputs(model)
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("safe", [False, True])
def test_merged_and_unmerged_by_user_code(safe):
    model, other = make(alpha=7), make(alpha=7)
    x = torch.ones(2, 12)
    other.merge_adapter(safe_merge=safe)
    with adapters_scaled_inside([model]):
        model.merge_adapter(safe_merge=safe)
        assert torch.equal(model(x), other(x))
        model.unmerge_adapter()
        other.unmerge_adapter()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        copied = copy.deepcopy(model)
        copied.delete_adapter("default")
        model.delete_adapter("default")


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}])
def test_other_adapters_stay(settings):
    model = make(**settings)
    before = [dict(layer.lora_variant) for layer in model.base_model.model]
    with adapters_scaled_inside([model]):
        assert [dict(layer.lora_variant) for layer in model.base_model.model] == before
    assert [dict(layer.lora_variant) for layer in model.base_model.model] == before
