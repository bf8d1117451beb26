"""The arithmetic of a training step, which can be said without running it."""

from transformers import PreTrainedConfig


#: Types of models whose layers are those that are counted here.
MODEL_TYPES = ("gemma", "llama", "mistral", "qwen2", "qwen3")


def step_flops(config: PreTrainedConfig, batch_shape: tuple[int, int], adapters: int | None = None) -> float | None:
    """
    Count the arithmetic of forward and backward pass over a `(batch, length)` in matrix products; an addition and a
    multiplication are two operations. What rematerialization computes again is left out, as in utilization (MFU).
    `None` if the model is none of [`MODEL_TYPES`].

    A token takes `2 N` operations forward and `4 N` backward, with `N` the parameters that are factors of products:
    all but the embedding and the norms (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention adds `4 L Q T`
    forward and `8 L Q T` backward: scores and their product with the values, over all `T` positions whether masked or
    not (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). Together `6 N + 12 L Q T`. With LoRA, weights need
    no gradient, only what goes into them: `4 N + 6 A + 12 L Q T`, with `A` the adapters' parameters, `adapters`.
    """
    if config.model_type not in MODEL_TYPES:
        return None
    rows, length = batch_shape
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = config.to_dict().get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config.num_key_value_heads * head_dim
    layer = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    attention = 4 * config.num_hidden_layers * queries * length
    backward = 4 * weights if adapters is None else 2 * weights + 6 * adapters
    return rows * length * float(2 * weights + backward + 3 * attention)
