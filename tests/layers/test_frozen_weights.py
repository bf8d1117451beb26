"""Frozen weights in bfloat16: which they are, that no number changes, and that they come back as they were."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.examples.tiny import FAMILIES, SIZES
from hf_tpu_ext.layers.frozen_weights import VERIFIED, FrozenWeights, bfloat16_holds


CPU = CPUBackend("for the test")
VOCABULARY = 96
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE = {**FAMILIES, "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32}, "qwen3_moe": EXPERTS}


def make(family="qwen3", **config):
    """A tiny model whose weights bfloat16 holds exactly, with TRL's fused head."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {}), **tokens, **config})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def adapt(model, **config):
    """The model with adapters that do something."""
    model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear", **config}))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model


def shorten(model, backend=CPU):
    frozen = FrozenWeights(model, backend, {name: (None,) * p.ndim for name, p in model.named_parameters()})
    frozen.shorten(lambda weights: bfloat16_holds(weights, backend))
    return frozen


def short_names(model):
    return {name.split("model.")[-1] for name in shorten(model).names}


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", VERIFIED)
def test_no_number_of_a_family_changes(xla, family, batch):
    """Loss, metrics and gradients by the fused head; logits with autocast, as evaluation computes them, and without."""
    model = adapt(make(family))

    def compute():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(**batch, labels=batch["input_ids"], fused_lm_head=True)
            logits = model(**batch, use_cache=False).logits
        scores.loss.backward()
        with torch.no_grad():
            plain = model(**batch, use_cache=False).logits
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        return [scores.loss, scores.log_probs, scores.entropy, scores.is_top1, logits, plain, *gradients]

    expected = compute()
    frozen = shorten(model)
    assert frozen.num_bytes
    for found, wanted in zip(compute(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_restored_bit_for_bit(backend, tied):
    model = backend.place(adapt(make(tie_word_embeddings=tied)))
    before = backend.fetch({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    types = [type(module) for module in model.modules()]
    frozen = shorten(model, backend)
    inner = model.get_base_model()
    assert (inner.lm_head.weight is inner.model.embed_tokens.weight) == tied
    matrices = {
        name
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and "lora" not in name and not parameter.requires_grad
    }
    assert frozen.names == matrices
    assert {name for name, parameter in parameters.items() if parameter.dtype == torch.bfloat16} == matrices
    assert frozen.num_bytes == sum(before[name].nbytes for name in matrices & before.keys()) / 2
    frozen.restore()
    assert [type(module) for module in model.modules()] == types
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
    after = backend.fetch({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize(
    ("bits", "holds"),
    [
        ([0x3F800000, 0x40490000], True),
        ([0x3F800000, 0x3F800001], False),
        ([0x3F808000], False),
        ([0x00000000, -0x80000000], True),
        ([0x7F800000, -0x00800000], True),
        ([0x7FC00001], False),
        ([0x00010000], True),
        ([0x00000001], False),
    ],
    ids=["short", "longer", "half way", "zeros", "infinities", "nan", "subnormal", "smallest"],
)
def test_exactness_is_that_of_bits(backend, bits, holds):
    weight = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert bfloat16_holds(backend.send([torch.ones(3), weight]), backend) == [True, holds]
    assert bfloat16_holds([], backend) == []


def test_a_weight_that_bfloat16_does_not_hold_stays_in_all_layers():
    model = adapt(make())
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
    everything, found = short_names(adapt(make())), short_names(model)
    assert everything - found == {f"layers.{layer}.mlp.up_proj.base_layer.weight" for layer in (0, 1)}


def test_norms_and_biases_stay():
    model = adapt(make("qwen2"))
    shorten(model)
    assert model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.bias.dtype == torch.float32
    assert model.get_base_model().model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (dict(use_dora=True, target_modules=["q_proj"]), {"q_proj.base_layer.weight"}),
        (dict(target_modules=["v_proj"], modules_to_save=["lm_head"]), {"lm_head.original_module.weight"}),
        (dict(target_modules=["v_proj", "embed_tokens"]), {"embed_tokens.base_layer.weight"}),
        (
            dict(target_modules=["v_proj"], trainable_token_indices=[5]),
            {"embed_tokens.token_adapter.base_layer.weight"},
        ),
    ],
    ids=["dora", "modules_to_save", "embedding", "token indices"],
)
def test_what_peft_looks_into_stays(config, left):
    model = adapt(make(tie_word_embeddings=False), **config)
    frozen = shorten(model)
    stayed = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not parameter.requires_grad and name not in frozen.names
    }
    assert frozen.names
    assert {name.split("model.")[-1].split("self_attn.")[-1] for name in stayed} == left


def test_a_subclass_stays():
    """Gemma's embedding rounds its scale to the dtype of its weight, which is tied to the head."""
    found = short_names(adapt(make("gemma3_text")))
    assert found and not any("embed" in name or "head" in name for name in found)


def test_other_models_stay():
    trained, partly = make(), make()
    partly.model.embed_tokens.requires_grad_(False)
    prompted = get_peft_model(make(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    unverified = adapt(make("gpt_neox"))
    for model in (trained, partly, prompted, unverified, nn.Linear(4, 4).requires_grad_(False)):
        assert not shorten(model).names


def test_a_model_that_is_frozen_as_a_whole(batch):
    model = make().requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch, use_cache=False).logits
        assert "lm_head.weight" in shorten(model).names
        torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=0, atol=0)


def test_a_state_dict_has_its_dtypes_and_ties(xla):
    model = adapt(make(tie_word_embeddings=True))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    frozen = shorten(xla.place(model), xla)
    found = frozen.in_float32(xla.fetch(dict(model.state_dict(keep_vars=True))))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    prefix = "base_model.model."
    assert found[f"{prefix}lm_head.weight"] is found[f"{prefix}model.embed_tokens.weight"]
