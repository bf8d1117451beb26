"""LoRA that scales between its factors, and is part of the layer's product, computes what PEFT's does."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_tpu_ext.layers.activation_checkpointing import Dots
from hf_tpu_ext.layers.adapters import adapters_scaled_inside


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


class Products(TorchDispatchMode):
    """Records of how many products the sums of matrix products are."""

    def __init__(self):
        super().__init__()
        self.summed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.summed.append(len(args[-1]))
        return function(*args, **(kwargs or {}))


def make_wide(unfrozen=False, bias=True, in_features=128):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(in_features, 192, bias=bias))
    config = LoraConfig(r=4, lora_alpha=7, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(base, config).double()
    if unfrozen:
        for parameter in model.parameters():
            parameter.requires_grad_()
    inputs = torch.randn(3, 64, in_features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, inputs.requires_grad_()


def run(model, inputs, *contexts):
    """Output and gradients, and of how many products the sums of the forward pass are."""
    with Products() as products:
        for context in contexts:
            context.__enter__()
        output = model(inputs)
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    output.sin().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), "inputs": inputs.grad, **gradients}, products.summed


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"unfrozen": True}, {"unfrozen": True, "bias": False}])
def test_one_product_of_a_wide_layer(settings):
    expected, _ = run(*make_wide(**settings))
    model, inputs = make_wide(**settings)
    with adapters_scaled_inside([model]):
        found, summed = run(model, inputs)
    # The layer's own, whose result a compiled program drops, that of the first factor, and both together.
    assert summed == [128, 128, 256]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "in_features", [120, 384], ids=["columns that do not fill a group", "narrower than the input"]
)
def test_other_layers_add_up(in_features):
    expected, _ = run(*make_wide(in_features=in_features))
    model, inputs = make_wide(in_features=in_features)
    with adapters_scaled_inside([model]):
        found, summed = run(model, inputs)
    assert summed == [in_features, in_features, 4]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("least", [8, 130, 500])
def test_the_sum_is_what_is_kept_for_the_backward_pass(least, monkeypatch):
    """Whether the layer's product is kept, it and the one with the adapter's columns, or neither of them."""
    monkeypatch.setattr("hf_tpu_ext.layers.activation_checkpointing._LEAST_SUMMED", least)
    expected, _ = run(*make_wide())
    model, inputs = make_wide()
    with adapters_scaled_inside([model]):
        with torch.no_grad(), Dots() as dots:
            output = model(inputs)
        torch.testing.assert_close(output, expected["output"], rtol=1e-11, atol=1e-11)
        kept = list(dots.results)
        if least == 8:
            torch.testing.assert_close(kept[0], output.flatten(0, -2))
        assert [tuple(tensor.shape) for tensor in kept] == ([(192, 192), (192, 4)] if least == 8 else [])
        found, summed = run(model, inputs, Dots(kept))
    assert summed == ([] if least == 8 else [128, 128, 256])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
