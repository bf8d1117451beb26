import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hf_tpu_ext.layers.flops import step_flops


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


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("config", [QWEN3, QWEN2, LLAMA, GEMMA, MISTRAL, BIASED], ids=lambda config: config.model_type)
def test_factors_of_products_are_those_of_the_model(config):
    sizes = [module.weight.numel() for module in on_meta(config).modules() if isinstance(module, nn.Linear)]
    heads = config.num_attention_heads
    queries = heads * (config.to_dict().get("head_dim") or config.hidden_size // heads)
    assert step_flops(config, (1, 1)) == 6 * sum(sizes) + 12 * config.num_hidden_layers * queries


def test_other_models_are_not_known():
    assert step_flops(GPT2Config(), (4, 1024)) is None


def test_arithmetic_is_6n_and_12lqt_a_token():
    # N: 155,582,464 of the embedding, 28 x 15,728,640 (2,097,152 + 2 x 1,048,576 + 2,097,152 + 3 x 3,145,728).
    token = 6 * 595_984_384 + 12 * 28 * 2048 * 1024
    assert step_flops(QWEN3, (4, 1024)) == 4 * 1024 * token


def test_arithmetic_of_lora_leaves_out_the_gradients_of_weights():
    # Of rank 8: 28 x 8 x (3,072 + 2 x 2,048 + 3,072 + 3 x 4,096).
    token = 4 * 595_984_384 + 6 * 5_046_272 + 12 * 28 * 2048 * 1024
    assert step_flops(QWEN3, (4, 1024), 5_046_272) == 4 * 1024 * token


def test_the_head_of_an_untied_model_counts_once():
    # 525,336,576 of the head, 32 x 218,103,808 (2 x 16,777,216 + 2 x 4,194,304 + 3 x 58,720,256).
    token = 6 * 7_504_658_432 + 12 * 32 * 4096 * 2048
    assert step_flops(LLAMA, (1, 2048)) == 2048 * token
