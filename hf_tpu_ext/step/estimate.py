"""What can be said of a model without running it: parameters, arithmetic and memory of a training step."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from .sliced_attention import SLICE_ELEMENTS


#: Types of models whose layers are those that are counted here.
MODEL_TYPES = ("gemma", "llama", "mistral", "qwen2", "qwen3")
_QKV_BIASED = {"qwen2"}
_QK_NORMED = {"qwen3"}


@dataclass(frozen=True)
class Dimensions:
    """
    Sizes of a dense decoder.

    Args:
        layers (`int`):
            Number of layers.
        hidden (`int`):
            Size of a token between layers.
        intermediate (`int`):
            Size of a token within the gated MLP.
        heads (`int`):
            Number of heads of queries.
        kv_heads (`int`):
            Number of heads of keys, and of values.
        head_dim (`int`):
            Size of a head.
        vocabulary (`int`):
            Number of tokens in the vocabulary.
        tied (`bool`):
            Whether the head is the embedding.
        qkv_bias (`bool`):
            Whether queries, keys and values have a bias.
        out_bias (`bool`):
            Whether what attention returns has one.
        mlp_bias (`bool`):
            Whether the MLP's products have one.
        qk_norm (`bool`):
            Whether queries and keys are normalized.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def queries(self) -> int:
        """Size of a token's queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Size of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """What goes into and comes out of each product with weights in a layer."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def matrices(self) -> int:
        """Parameters of a layer that are factors of products."""
        return sum(size * other for size, other in self.linears.values())

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        biases = self.qkv_bias * (self.queries + 2 * self.keys) + self.out_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.matrices + biases + norms

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.layer_parameters + self.embedding * (1 if self.tied else 2) + self.hidden


def read_dimensions(config: PreTrainedConfig) -> Dimensions | None:
    """Read the sizes of a model from its configuration; `None` if it is none of [`MODEL_TYPES`]."""
    kind = config.model_type
    if kind not in MODEL_TYPES:
        return None
    values = config.to_dict()
    biased = bool(values.get("attention_bias"))
    return Dimensions(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=values.get("head_dim") or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=biased or kind in _QKV_BIASED,
        out_bias=biased,
        mlp_bias=bool(values.get("mlp_bias")),
        qk_norm=kind in _QK_NORMED,
    )


def count_lora_parameters(dimensions: Dimensions, rank: int, targets: str | list[str] = "all-linear") -> int | None:
    """
    Count the parameters that LoRA adds.

    Args:
        dimensions ([`Dimensions`]):
            Sizes of the model.
        rank (`int`):
            Rank of the adapters.
        targets (`str` or `list[str]`, *optional*, defaults to `"all-linear"`):
            As `target_modules` of PEFT's `LoraConfig`.

    Returns:
        `int` or `None`: Their number: `rank x (inputs + outputs)` for each product; `None` if a target is not a product of a
        layer.
    """
    linears = dimensions.linears
    names = list(linears) if targets == "all-linear" else targets
    if isinstance(names, str) or not set(names) <= linears.keys():
        return None
    return dimensions.layers * rank * sum(sum(linears[name]) for name in names)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of a model, a tied weight once: all of them, and those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, requires_grad in sizes if requires_grad)


def step_flops(
    dimensions: Dimensions,
    batch_shape: tuple[int, int],
    adapters: int | None = None,
    rematerialization: str = "none",
    sliced_attention: bool = False,
) -> float | None:
    """
    Count the arithmetic of forward and backward pass in matrix products.

    A token takes `2 N` operations forward and `4 N` backward, with `N` the parameters that are factors of products: all but
    the embedding and the norms (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Attention adds `4 L Q T` forward and
    `8 L Q T` backward: scores and their product with the values, over all `T` positions whether masked or not (Chowdhery et
    al. 2022, PaLM, arXiv:2204.02311, appendix B). Together `6 N + 12 L Q T`. With LoRA, weights need no gradient, only what
    goes into them: `4 N + 6 A + 12 L Q T`, with `A` the adapters' parameters.

    Rematerialization computes again what was not kept: with `"full"` the layers, but not their last product, which nothing
    in a layer's backward pass needs; with `"dots"` attention. Either way, the head is then taken to be TRL's fused one, which
    as a [loop][hf_tpu_ext.step.looped_head] computes its logits again, while otherwise the compiler sees that it has them; and
    attention in slices computes its scores once more.

    Args:
        dimensions ([`Dimensions`]):
            Sizes of the model.
        batch_shape (`tuple[int, int]`):
            `(batch, length)`.
        adapters (`int`, *optional*):
            Parameters of LoRA adapters. By default, all weights are trained.
        rematerialization (`str`, *optional*, defaults to `"none"`):
            What is computed twice: `"none"` of the above, which is what utilization (MFU) is about, `"head"`, `"dots"` or
            `"full"`.
        sliced_attention (`bool`, *optional*, defaults to `False`):
            Whether attention is computed in slices.

    Returns:
        `float` or `None`: Operations; an addition and a multiplication are two. `None` for other policies.
    """
    rows, length = batch_shape
    layers = dimensions.layers * dimensions.matrices
    attention = 4 * dimensions.layers * dimensions.queries * length
    weights = layers + dimensions.embedding
    flops = 2 * weights + attention
    flops += (4 * weights if adapters is None else 2 * weights + 6 * adapters) + 2 * attention
    always = 2 * dimensions.embedding
    if sliced_attention and rows * dimensions.heads * length**2 > SLICE_ELEMENTS:
        always += attention // 2
    again = {
        "none": 0,
        "head": always,
        "dots": always + attention,
        "full": always
        + attention
        + 2 * (layers - dimensions.layers * dimensions.hidden * dimensions.intermediate)
        + 2 * (adapters or 0),
    }
    return rows * length * float(flops + again[rematerialization]) if rematerialization in again else None
