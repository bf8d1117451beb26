"""Which layers of a model are rounded, where adapters are, and what cannot be rounded."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.quantization.fake_quantized import FakeQuantization, _LongProduct, without_rounding
from hf_tpu_ext.quantization.rounding import Rounding, split


IDS = torch.arange(3, 35).reshape(2, 16)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a tiny model, with adapters that have been trained for a while where `lora` is given."""
    directory = make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2, tie_word_embeddings=True)

    def load(lora=None, cls=LoraConfig):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if lora is None:
            return model.eval()
        torch.manual_seed(0)
        settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
        return get_peft_model(model, LoraConfig(r=4, **{**settings, **lora})).eval()

    return load


@torch.no_grad()
def logits(model, **kwargs):
    return model(input_ids=IDS, **kwargs).logits


@torch.no_grad()
def rounded_by_torchao(model, rounding, embeddings=False):
    """The model with its weights replaced by what torchao rounds them to."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    config = IntxWeightOnlyConfig(getattr(torch, f"int{rounding.bits}"), PerGroup(rounding.group_size))

    def chosen(module, name):
        ends = isinstance(module, torch.nn.Embedding) or "lm_head" in name
        return (isinstance(module, torch.nn.Linear) or ends) and embeddings >= ends and "norm" not in name

    if embeddings:
        # Two weights from here on, of which each is rounded.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    quantize_(model, config, lambda module, name: chosen(module, name) and hasattr(module, "weight"))
    return model


@pytest.mark.parametrize("embeddings", [False, True])
def test_computes_as_torchaos_quantized_model(load, embeddings):
    pytest.importorskip("torchao")
    rounding, model = Rounding(4, 32), load()
    before = {name: (parameter, type(module)) for name, module in model.named_modules() for parameter in [module]}
    plain, names = logits(model), list(model.state_dict())
    fake = FakeQuantization(model, rounding, embeddings=embeddings)
    with fake.enable():
        found = logits(model)
        assert list(model.state_dict()) == names
        with without_rounding(rounding):
            assert torch.equal(logits(model), plain)
    assert {name: (module, type(module)) for name, module in model.named_modules()} == before
    assert torch.equal(logits(model), plain)
    assert fake.head is (model.lm_head if embeddings else None)
    expected = logits(rounded_by_torchao(load(), rounding, embeddings))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (found - plain).abs().max() > 0.1


def test_adapters_inside_are_rounded_with_the_weight(load):
    rounding, model = Rounding(3, 16), load({})
    fake = FakeQuantization(model, rounding)
    assert len(fake.linears) == 14 and len(fake.inside) == 4
    merged = load({}).merge_and_unload()
    with fake.enable():
        found = logits(model)
        with model.disable_adapter():
            of_base = logits(model)
    with FakeQuantization(merged, rounding).enable():
        expected = logits(merged)
    assert torch.equal(found, expected)
    base = load()
    with FakeQuantization(base, rounding).enable():
        assert torch.equal(of_base, logits(base))


def test_adapters_inside_are_added_in_float32_under_autocast(load):
    rounding, model = Rounding(4, 32), load({})
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    hidden = torch.randn(3, 64)
    with FakeQuantization(model, rounding).enable(), torch.autocast("cpu", torch.bfloat16):
        found = layer(hidden)
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, torch.nn.functional.linear(hidden, rounding.round_weight(weight)))


def test_products_on_a_tpu_are_as_long_as_elsewhere():
    """A TPU multiplies what it has rounded to bfloat16."""

    def as_on_tpu(left, right):
        return left.bfloat16().float() @ right.bfloat16().float()

    up, down = (torch.randn(shape, requires_grad=True) for shape in ((24, 8), (8, 32)))
    exact = up @ down
    found = _LongProduct.apply(up, down, as_on_tpu)
    assert (found - exact).abs().max() < 2**-7 * (as_on_tpu(up, down) - exact).abs().max()
    torch.testing.assert_close(_LongProduct.apply(up, down), exact, rtol=1e-5, atol=1e-6)
    direction = torch.randn(24, 32)
    theirs, ours = (torch.autograd.grad(product, (up, down), direction) for product in (exact, found))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_parts_of_a_float_are_exact(xla, device):
    values = torch.randn(64, 64) * torch.logspace(-20, 20, 64)
    short, rest = xla.fetch(split(values.to(device)))
    assert torch.equal(short.bfloat16().float(), short)
    assert torch.equal(short + rest, values)
    assert (rest.abs() <= values.abs() * 2**-8).all()


def test_adapters_beside_stay_as_they_are(load):
    rounding, model = Rounding(3, 16), load({})
    fake = FakeQuantization(model, rounding, adapters="beside")
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    hidden = torch.randn(3, 64)
    with fake.enable():
        found = layer(hidden)
    update = layer.get_delta_weight("default")
    expected = hidden @ rounding.round_weight(layer.base_layer.weight).T + hidden @ update.T
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inside_and_beside_train_the_adapters(load):
    for adapters in ("inside", "beside"):
        model = load({})
        with FakeQuantization(model, Rounding(4, 32), adapters).enable():
            model(input_ids=IDS, labels=IDS).loss.backward()
        trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
        assert all(parameter.grad.abs().sum() > 0 for name, parameter in model.named_parameters() if name in trained)


@pytest.mark.parametrize(
    ("lora", "settings", "message"),
    [
        (
            None,
            dict(group_size=48),
            "qat_group_size=48 does not divide the 64 inputs of model.layers.*.self_attn.q_proj. Set",
        ),
        (
            None,
            dict(group_size=128),
            "Set it to a size that divides the inputs of all layers, one of 64, 32, 16, 8, 4, 2",
        ),
        ({"use_dora": True}, dict(), "qat_adapters='inside' rounds W + B A of plain LoRA"),
        ({"lora_bias": True, "target_modules": ["q_proj"]}, dict(), "or one with a bias. Set qat_adapters='beside'"),
        (
            {"target_modules": ["q_proj", "embed_tokens"]},
            dict(embeddings=True),
            "does not work with adapters on embeddings",
        ),
    ],
)
def test_errors_name_the_fix(load, lora, settings, message):
    model = load(lora)
    with pytest.raises(ValueError) as error:
        FakeQuantization(model, Rounding(4, settings.pop("group_size", 32)), **settings)
    assert message in str(error.value)


def test_a_model_without_linear_layers():
    with pytest.raises(ValueError, match="the model has none that is a torch.nn.Linear"):
        FakeQuantization(torch.nn.Sequential(torch.nn.LayerNorm(4)), Rounding(4, 4))
