"""Memory of a training step by formulas, for where there is no compiler."""

from collections import Counter
from dataclasses import dataclass

from ..step.attention import scores_at_once
from ..step.estimate import Dimensions


# What a layer's backward pass has at once, in scores of a layer: these, in float32, and their gradient. If layers are not
# computed again, their own scores come on top.
_SCORES, _SCORES_KEPT = 2.5, 1.5
# Instructions of anything but layers, and of a layer: that is computed again, and that is not.
_CODE, _CODE_OF_LAYER_AGAIN, _CODE_OF_LAYER, _CODE_OF_LOOP = 15e6, 21e6, 17e6, 30e6
# What of a phase fits beside the processor, in VMEM.
_BESIDE_PROCESSOR = 112 * 2**20
# Elements of a tile of logits.
_TILE = 2**24
#: What can be computed again.
POLICIES = ("none", "full")


@dataclass(frozen=True)
class MemoryEstimate:
    """
    Memory of a chip by formulas.

    Args:
        parts (`dict[str, int]`):
            Bytes by what they are for, in the order of the page.
    """

    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def estimate_memory(
    dimensions: Dimensions,
    batch_shape: tuple[int, int],
    adapters: int | None = None,
    rematerialization: str = "full",
    layers_in_loop: bool = False,
    accumulates: bool = False,
    sliced_attention: bool = False,
) -> MemoryEstimate | None:
    """
    Estimate what a training step takes of the memory of a chip that has the whole model.

    Computation is in bfloat16, trained weights, their gradients and both moments of AdamW are in float32, frozen weights in
    bfloat16. Attention is eager, whole or in slices, and the head TRL's fused one. A step is taken to have two phases, of
    which the one that needs more counts: the head, and the backward pass of the layers, at whose end all gradients wait for
    their norm. How many scores and bytes of a token there are at once is what libtpu 0.0.21 was seen to make of such
    programs for v5e.

    Args:
        dimensions ([`Dimensions`]):
            Sizes of the model.
        batch_shape (`tuple[int, int]`):
            `(batch, length)` of one chip.
        adapters (`int`, *optional*):
            Parameters of LoRA adapters with dropout. By default, all weights are trained.
        rematerialization (`str`, *optional*, defaults to `"full"`):
            One of [`POLICIES`].
        layers_in_loop (`bool`, *optional*, defaults to `False`):
            Whether the layers are the turns of one loop.
        accumulates (`bool`, *optional*, defaults to `False`):
            Whether gradients are summed up over micro-steps, and so are there throughout.
        sliced_attention (`bool`, *optional*, defaults to `False`):
            Whether attention is computed [in slices][hf_tpu_ext.step.attention] of a layer.

    Returns:
        [`MemoryEstimate`] or `None`: Memory by part; `None` for what this does not describe.
    """
    if rematerialization not in POLICIES or layers_in_loop and rematerialization == "none":
        return None
    rows, length = batch_shape
    tokens, layers, full = rows * length, dimensions.layers, adapters is None
    trained = dimensions.parameters if full else adapters
    trained_layers = layers * dimensions.layer_parameters if full else adapters
    embedding = dimensions.embedding if full else 0
    count = rows * dimensions.heads * length**2
    at_once = scores_at_once(count, sliced_attention)
    sliced, scores = at_once < count, 4 * at_once
    # What a layer's backward pass goes back to, in bytes of a token: in the MLP in bfloat16, between the parts of a layer in
    # float32; what goes into each adapter after dropout, with its mask, and what three of them return.
    of_token = 6 * dimensions.intermediate + 8 * dimensions.hidden
    if not full:
        of_token += 3 * (5 * dimensions.hidden + dimensions.queries + dimensions.intermediate)
        of_token += 4 * (dimensions.queries + 2 * dimensions.keys)
    # If that is computed again just before, gradients come on top.
    again_of_token = 14 * dimensions.intermediate + 12 * dimensions.hidden
    if not full and not layers_in_loop:
        again_of_token += 4 * dimensions.hidden + 16 * dimensions.queries
    # Slices of queries, outputs and gradients, put next to each other.
    stacked = 12 * tokens * dimensions.queries if sliced else 0
    if rematerialization == "full":
        kept = {"inputs of layers": 4 * layers * tokens * dimensions.hidden}
        working = {"attention scores": int(_SCORES * scores), "other activations": tokens * again_of_token + stacked}
        code = _CODE_OF_LOOP if layers_in_loop else _CODE + layers * _CODE_OF_LAYER_AGAIN
    else:
        kept = {"attention scores": 0 if sliced else layers * scores, "other activations": layers * tokens * of_token}
        working = {
            "attention scores": int((_SCORES if sliced else _SCORES_KEPT) * scores),
            "other activations": stacked,
        }
        code = _CODE + layers * _CODE_OF_LAYER
    gradients = 0 if accumulates else 4 * trained_layers
    # Made once for all layers.
    kept["attention mask"] = 4 * rows * length**2
    kept["gradients of the embedding"] = 4 * embedding
    phases = (
        _together(
            kept,
            # In bfloat16 and in float32.
            _without({"logits": 12 * _TILE}, _BESIDE_PROCESSOR),
        ),
        _together(
            kept,
            _without(working, _BESIDE_PROCESSOR),
            {"gradients of layers": gradients},
        ),
    )
    always = {
        "weights": 4 * trained + (0 if full else 2 * dimensions.parameters),
        "optimizer state": 8 * trained,
        "sums of gradients": 4 * trained if accumulates else 0,
        "batch": 24 * tokens,
    }
    most = max(phases, key=lambda phase: sum(phase.values()))
    parts = {**always, **most, "generated code": int(code)}
    return MemoryEstimate({name: size for name, size in parts.items() if size})


def _together(*parts: dict[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _without(parts: dict[str, int], size: int) -> dict[str, int]:
    total = sum(parts.values())
    return {name: max(0, total - size) * part // max(1, total) for name, part in parts.items()}
