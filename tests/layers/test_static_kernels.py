"""The code paths of a model whose shapes do not depend on the data."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface

from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.attention import attention_to_load_with, choose_attention
from hf_tpu_ext.layers.static_kernels import use_static_kernels


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", hidden_size=32, num_hidden_layers=1)


@pytest.mark.parametrize("wrap", ["none", "peft", "module"])
def test_attention_and_experts(moe_dir, wrap):
    model = AutoModelForCausalLM.from_pretrained(moe_dir)
    assert (model.config._attn_implementation, model.config._experts_implementation) != ("eager", "batched_mm")
    wrapped = {
        "none": lambda: model,
        "peft": lambda: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),
        "module": lambda: nn.ModuleDict({"student": model}),
    }[wrap]()
    use_static_kernels(wrapped)
    for module in (model, model.model, model.model.layers[0].self_attn):
        assert module.config._attn_implementation == "eager"
        assert module.config._experts_implementation == "batched_mm"


def own_attention(module, query, key, value, mask, **kwargs):
    return query.transpose(1, 2), None


def own_experts(module, hidden_states, *args):
    return hidden_states


def test_what_the_user_has_registered_is_kept(moe_dir, xla):
    AttentionInterface.register("own_attention", own_attention)
    ExpertsInterface.register("own_experts", own_experts)
    model = AutoModelForCausalLM.from_pretrained(moe_dir, attn_implementation="own_attention")
    model.set_experts_implementation("own_experts")
    use_static_kernels(model, choose_attention(model, xla))
    assert model.config._attn_implementation == "own_attention"
    assert model.config._experts_implementation == "own_experts"
    assert attention_to_load_with("own_attention") == ("own_attention", [])
    assert attention_to_load_with("flex_attention")[0] == "eager"
    with pytest.raises(UserError, match="attention='slices' does not go together with the attention 'own_attention'"):
        choose_attention(model, xla, "slices")
    model.set_attn_implementation("sdpa")
    assert choose_attention(model, xla, "slices") == "sliced"


def test_layers_that_choose_tokens_keep_their_own_attention(xla):
    """They leave the choice out where the attention has another name than upstream's."""
    config = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=1, first_k_dense_replace=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert choose_attention(model, xla) == "eager"
    with pytest.raises(UserError, match="attention='slices' is not possible: .*indexed_attention.*Leave it out"):
        choose_attention(model, xla, "slices")


def test_experts_compile_once_for_any_routing(moe_dir, xla):
    """And compute what the default kernels do on the host."""
    model = AutoModelForCausalLM.from_pretrained(moe_dir).eval()
    batches = [torch.full((2, 8), 5), torch.arange(16).reshape(2, 8), torch.arange(16).reshape(2, 8) * 7]
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in batches]
    use_static_kernels(model)
    xla.place(model)
    mask = xla.send(torch.ones(2, 8, dtype=torch.int64))
    batches = xla.send(batches)
    xla.wait()
    before = xla.counters()
    logits = []
    with torch.no_grad():
        for ids in batches:
            logits.append(model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
            xla.wait()
    spent = xla.counters() - before
    assert (spent.compiles, spent.reads, spent.fallbacks) == (1, 0, 0)
    torch.testing.assert_close(xla.fetch(logits), expected, rtol=1e-5, atol=1e-5)
