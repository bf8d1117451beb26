"""The code paths of a model whose shapes do not depend on the data; those of some families beside upstream's own, on eager CPU."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    XLNetConfig,
    XLNetModel,
)
from transformers.integrations.moe import ExpertsInterface

from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.attention import attention_to_load_with, choose_attention
from hf_tpu_ext.layers.static_kernels import use_static_code, use_static_kernels


sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_configs import VOCABULARY, tiny_config  # noqa: E402


@pytest.mark.parametrize(
    "model_type",
    [
        *("dbrx", "jetmoe", "longcat_flash", "qwen4_exp_text", "recurrent_gemma", "xlm", "flaubert"),
        *("kimi_k25", "switch_transformers"),
    ],
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_numbers_and_gradients_are_upstreams(xla, model_type, padding):
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config(model_type), attn_implementation="eager").double()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ids = torch.randint(3, VOCABULARY, (3, 17))
    mask = torch.ones_like(ids)
    for row, absent in zip(mask, (0, 4, 9), strict=True):
        row[17 - absent :] = 0
    if padding == "left":
        mask = mask.flip(1)
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids

    def outputs():
        model.zero_grad()
        hidden = model(**inputs).last_hidden_state
        (hidden * mask[..., None]).pow(2).mean().backward()
        # That of an expert without tokens is 0 in the one and absent in the other.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        # Padding on the left sees nothing: its numbers are NaN in some families, and with them all gradients.
        return [hidden[mask.bool()].detach(), *(gradients if padding == "right" else ())]

    expected = outputs()
    use_static_code(model)
    torch.testing.assert_close(outputs(), expected, rtol=1e-9, atol=1e-9, equal_nan=padding == "left")


@pytest.mark.parametrize("model_type", ["bart", "t5", "deberta-v2"])
def test_classifiers(xla, model_type):
    """Rows end at several places; DeBERTa leaves out one that has no label."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config.num_labels = 3
    model = AutoModelForSequenceClassification.from_config(config).double()
    ids = torch.randint(3, VOCABULARY, (3, 9))
    ids[0, 8] = ids[1, 5] = ids[2, 2] = config.eos_token_id
    inputs = {"input_ids": ids, "labels": torch.tensor([2, 0, -100 if model_type == "deberta-v2" else 1])}

    def outputs():
        model.zero_grad()
        found = model(**inputs)
        found.loss.backward()
        return [found.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, parameters = outputs(), inspect.signature(model.forward).parameters
    use_static_code(model)
    # DeBERTa's loss is in float32.
    torch.testing.assert_close(outputs(), expected, rtol=1e-6, atol=1e-7)
    assert inspect.signature(model.forward).parameters == parameters


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


@pytest.mark.parametrize("reuse_len", [None, 3])
@pytest.mark.parametrize("mem_len", [None, 0, 4, 6, 512])
def test_memory_of_xlnet(xla, mem_len, reuse_len):
    """It may be longer than the rows so far."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, d_model=8, n_layer=2, n_head=2, d_inner=8)
    model = XLNetModel(XLNetConfig(**sizes, mem_len=mem_len, reuse_len=reuse_len)).eval()
    ids = torch.randint(3, 16, (2, 5))

    @torch.no_grad()
    def outputs(send):
        first = model(send(ids), use_mems=True)
        second = model(inputs_embeds=model.word_embedding(send(ids)), mems=first.mems, use_mems=True)
        return [first.last_hidden_state, second.last_hidden_state, *first.mems, *second.mems]

    expected = outputs(torch.clone)
    use_static_code(model)
    xla.place(model)
    torch.testing.assert_close(xla.fetch(outputs(xla.send)), expected, rtol=1e-5, atol=1e-5)
    assert model.mem_len == mem_len
