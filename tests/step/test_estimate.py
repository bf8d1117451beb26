from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hf_tpu_ext.step.estimate import count_lora_parameters, read_dimensions, step_flops


QWEN3 = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
QWEN2 = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
GEMMA = GemmaConfig()
MISTRAL = MistralConfig()
BIASED = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    attention_bias=True,
    mlp_bias=True,
)
# Counted by hand, from the sizes above (of Gemma and Mistral, those of the 7B models, which are the defaults).
BY_HAND = [
    # 155,582,464 of the embedding, 28 x 15,730,944 (2,097,152 + 2 x 1,048,576 + 2,097,152 + 3 x 3,145,728 + 2,048 + 256),
    # 1,024.
    (QWEN3, 596_049_920),
    # 136,134,656, 24 x 14,912,384 (2 x 802,816 + 2 x 114,688 + 1,152 + 3 x 4,358,144 + 1,792), 896.
    (QWEN2, 494_032_768),
    # 2 x 525,336,576, 32 x 218,112,000 (2 x 16,777,216 + 2 x 4,194,304 + 3 x 58,720,256 + 8,192), 4,096.
    (LLAMA, 8_030_261_248),
    # 786,432,000, 28 x 276,830,208 (4 x 12,582,912 + 3 x 75,497,472 + 6,144), 3,072.
    (GEMMA, 8_537_680_896),
    # 2 x 131,072,000, 32 x 218,112,000, 4,096.
    (MISTRAL, 7_241_732_096),
]


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("config", "count"), BY_HAND, ids=lambda value: getattr(value, "model_type", None))
def test_parameters_counted_by_hand(config, count):
    assert read_dimensions(config).parameters == count


@pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA, GEMMA, MISTRAL, BIASED], ids=lambda config: config.model_type)
def test_parameters_are_those_of_the_model(config):
    assert read_dimensions(config).parameters == sum(p.numel() for p in on_meta(config).parameters())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters_are_those_of_peft(targets):
    model = get_peft_model(on_meta(QWEN2), LoraConfig(r=8, target_modules=targets))
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count_lora_parameters(read_dimensions(QWEN2), 8, targets) == count


def test_adapters_counted_by_hand():
    # 28 layers x rank 8 x (3,072 + 2 x 2,048 + 3,072 + 3 x 4,096).
    assert count_lora_parameters(read_dimensions(QWEN3), 8) == 5_046_272


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ".*_proj"])
def test_adapters_of_other_modules_are_not_known(targets):
    assert count_lora_parameters(read_dimensions(QWEN3), 8, targets) is None


def test_other_models_are_not_known():
    assert read_dimensions(GPT2Config()) is None


def test_arithmetic_is_6n_and_12lqt_a_token():
    # N without the norms: 596,049,920 - 28 x 2,304 - 1,024.
    token = 6 * 595_984_384 + 12 * 28 * 2048 * 1024
    assert step_flops(read_dimensions(QWEN3), (4, 1024)) == 4 * 1024 * token


def test_arithmetic_of_lora_leaves_out_the_gradients_of_weights():
    token = 4 * 595_984_384 + 6 * 5_046_272 + 12 * 28 * 2048 * 1024
    assert step_flops(read_dimensions(QWEN3), (4, 1024), 5_046_272) == 4 * 1024 * token


def test_the_head_of_an_untied_model_counts_once():
    # 8,030,261,248 without the embedding, 32 x 8,192 and 4,096.
    token = 6 * 7_504_658_432 + 12 * 32 * 4096 * 2048
    assert step_flops(read_dimensions(LLAMA), (1, 2048)) == 2048 * token


@pytest.mark.parametrize(
    ("adapters", "compiled"),
    # What libtpu 0.0.21 made, for one v5e, of an optimizer step of 4 x 1024 tokens with layers in a loop, rematerialized.
    [(None, 22_647_755_800_000), (5_046_272, 17_930_173_500_000)],
)
def test_arithmetic_of_compiled_steps(adapters, compiled):
    assert step_flops(read_dimensions(QWEN3), (4, 1024), adapters, "full") == pytest.approx(compiled, rel=1e-3)


@pytest.mark.parametrize(("policy", "adapters"), [("full", 1_441_792), ("head", None)])
def test_attention_in_slices_computes_its_scores_once_more(policy, adapters):
    dimensions = replace(read_dimensions(QWEN3), layers=8)
    whole, sliced = (step_flops(dimensions, (4, 1024), adapters, policy, is_sliced) for is_sliced in (False, True))
    assert sliced - whole == 4 * 1024 * 2 * 8 * 2048 * 1024
    if policy == "full":
        # Of libtpu 0.0.21.
        assert sliced == pytest.approx(7_986_518_949_888, rel=1e-2)
    # As many scores as a slice has are not cut.
    assert step_flops(dimensions, (1, 512), adapters, policy, True) == step_flops(
        dimensions, (1, 512), adapters, policy
    )


def test_rematerialization_adds_what_is_computed_again():
    none, head, dots, full = (
        step_flops(read_dimensions(QWEN3), (4, 1024), None, policy) for policy in ("none", "head", "dots", "full")
    )
    assert head - none == 4 * 1024 * 2 * 155_582_464
    assert dots - head == 4 * 1024 * 4 * 28 * 2048 * 1024
    # The products of the layers without the last of each.
    assert full - dots == 4 * 1024 * 2 * 28 * (15_730_944 - 2_304 - 3_145_728)


def test_other_rematerialization_is_not_known():
    assert step_flops(read_dimensions(QWEN3), (4, 1024), None, "mlp") is None
