import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture(params=["eager", "sdpa"])
def tiny_qwen3(request, xla):
    """A Qwen3 of two layers in float32, run eagerly on CPU, once the runtime of XLA has started for the tests after it."""
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=64,
        attn_implementation=request.param,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)
