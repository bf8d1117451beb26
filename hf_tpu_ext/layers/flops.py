"""What can be said of a model without running it: its parameters, and the arithmetic of a training step."""

from dataclasses import dataclass

from transformers import PreTrainedConfig


#: Types of models whose layers are those that are counted here.
MODEL_TYPES = ("gemma", "llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a dense decoder: numbers of layers and heads, widths, and tokens in the vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def queries(self) -> int:
        """Size of a token's queries."""
        return self.heads * self.head_dim

    @property
    def matrices(self) -> int:
        """Parameters of a layer that are factors of products."""
        attention = 2 * self.queries + 2 * self.kv_heads * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden


def read_dimensions(config: PreTrainedConfig) -> Dimensions | None:
    """Read the sizes of a model from its configuration; `None` if it is none of [`MODEL_TYPES`]."""
    if config.model_type not in MODEL_TYPES:
        return None
    return Dimensions(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
    )


def step_flops(dimensions: Dimensions, batch_shape: tuple[int, int], adapters: int | None = None) -> float:
    """
    Count the arithmetic of forward and backward pass over a `(batch, length)` in matrix products; an addition and a
    multiplication are two operations. What rematerialization computes again is left out, as in utilization (MFU).

    A token takes `2 N` operations forward and `4 N` backward, with `N` the parameters that are factors of products:
    all but the embedding and the norms (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention adds `4 L Q T`
    forward and `8 L Q T` backward: scores and their product with the values, over all `T` positions whether masked or
    not (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). Together `6 N + 12 L Q T`. With LoRA, weights need
    no gradient, only what goes into them: `4 N + 6 A + 12 L Q T`, with `A` the adapters' parameters, `adapters`.
    """
    rows, length = batch_shape
    attention = 4 * dimensions.layers * dimensions.queries * length
    weights = dimensions.layers * dimensions.matrices + dimensions.embedding
    backward = 4 * weights if adapters is None else 2 * weights + 6 * adapters
    return rows * length * float(2 * weights + backward + 3 * attention)
