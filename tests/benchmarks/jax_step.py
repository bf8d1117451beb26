"""
A training step of the same models written by hand in JAX, as people write one for a TPU: a scan over stacked layers,
rematerialization, splash attention, a loss over blocks of tokens. `tpu_beside_jax.py` compiles it, in a process that does not
import torch:

    python jax_step.py DIRECTORY

It takes `options.json` from the directory and writes what `hf_tpu_ext/plan/tpu_compiler.py` writes.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from parts import ADAPTERS, ATTENTION, HEAD, LAYER, OPTIMIZER, ROPE_AND_NORMS, scope_of

from hf_tpu_ext.plan.tpu_compiler import set_environment, write_compiled


# Before JAX is imported. It would look for a TPU otherwise.
set_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax_loop import make_angles, rms_norm, rotate  # noqa: E402


POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# Of the adapters: scale is TRL's `lora_alpha` over the rank.
RANK, SCALE = 8, 32 / 8
#: Weights of fewer numbers are on every chip.
SMALL = 2**20

_Arrays = dict[str, Any]


def part(name: str) -> Callable[[Callable], Callable]:
    """Make what a function computes a part of the model, which cycles are counted by."""
    return jax.named_scope(scope_of(name))


@dataclass(frozen=True)
class Step:
    """
    A training step.

    Args:
        config (`dict[str, Any]`):
            The model's `config.json`: of Qwen2, Qwen3 or Gemma 3.
        rows (`int`):
            Rows of a batch, on all chips.
        length (`int`):
            Tokens of a row.
        lora (`bool`):
            Whether adapters are trained in float32 beside weights in bfloat16, or weights.
        rematerialization (`str`):
            One of [`POLICIES`].
        block (`int`):
            Tokens that attention and the loss take at once: a multiple of 128 that divides the length.
        mesh ([`~jax.sharding.Mesh`]):
            The chips. Rows and large weights are split over them.
        interpret (`bool`, *optional*, defaults to `False`):
            Whether kernels run without a TPU, slowly.
        dtype (`jnp.dtype`, *optional*, defaults to `jnp.bfloat16`):
            What products are computed in.
        trained_dtype (`str`, *optional*, defaults to `"float32"`):
            Of weights that are trained, norms aside, and of their moments.
    """

    config: dict[str, Any]
    rows: int
    length: int
    lora: bool
    rematerialization: str
    block: int
    mesh: Mesh
    interpret: bool = False
    dtype: Any = jnp.bfloat16
    trained_dtype: str = "float32"

    @cached_property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @cached_property
    def is_gemma(self) -> bool:
        return self.config["model_type"].startswith("gemma")

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of all layers."""
        return self.config.get("layer_types") or ["full_attention"] * self.config["num_hidden_layers"]

    @cached_property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """How the layers of a model are stacked: whole periods, which are a scan, and the rest."""
        layers = len(self.kinds)
        period = next(n for n in range(1, layers + 1) if self.kinds[n:] == self.kinds[:-n])
        turns, rest = divmod(layers, period)
        return {"layers": (turns, period), **({"rest": (rest,)} if rest else {})}

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer."""
        hidden, inner = self.config["hidden_size"], self.config["intermediate_size"]
        queries, keys = (self.config[f"num_{kind}_heads"] * self.head_dim for kind in ("attention", "key_value"))
        return {
            "q_proj": (hidden, queries),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (queries, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }

    def attend(self, kind: str) -> Callable[..., jax.Array]:
        """Causal attention of a kind of layer, of queries `(rows, heads, length, head_dim)`, and of keys and values."""
        names = "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
        mask = masks.CausalMask((self.length, self.length))
        if kind == "sliding_attention":
            mask = masks.LocalMask(mask.shape, (self.config["sliding_window"] - 1, 0), 0)
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * self.config["num_attention_heads"]),
            block_sizes=splash.BlockSizes(**{f"block_{name}": self.block for name in names}),
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        return self.on_chips(jax.vmap(kernel), *[P("data")] * 4)

    def on_chips(self, function: Callable, *specs: P) -> Callable:
        """Make each chip apply a function to its part of arguments; the last spec is that of the result."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs[:-1], out_specs=specs[-1], check_vma=False)

    # ---- Weights ----

    @cached_property
    def shapes(self) -> tuple[_Arrays, _Arrays]:
        """What is trained, and what is frozen: in a layer's dictionary stacked by layers."""
        hidden = self.config["hidden_size"]
        wide = jnp.bfloat16 if self.lora else jnp.dtype(self.trained_dtype)

        def array(*shape: int, dtype=wide) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        weights = {"embed_tokens": array(self.config["vocab_size"], hidden), "norm": array(hidden, dtype=jnp.float32)}
        if not self.config["tie_word_embeddings"]:
            weights["lm_head"] = array(self.config["vocab_size"], hidden)
        widths = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self.is_gemma:
            widths |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if self.config["model_type"] == "qwen2":
            widths |= {f"{name}_bias": self.matrices[f"{name}_proj"][1] for name in "qkv"}
        else:
            widths |= {"q_norm": self.head_dim, "k_norm": self.head_dim}
        adapters = {}
        for stack, sizes in self.stacks.items():
            weights[stack] = {name: array(*sizes, *matrix) for name, matrix in self.matrices.items()}
            weights[stack] |= {name: array(*sizes, width, dtype=jnp.float32) for name, width in widths.items()}
            adapters[stack] = {}
            for name, (inputs, outputs) in self.matrices.items() if self.lora else ():
                adapters[stack][f"{name}_a"] = array(*sizes, inputs, RANK, dtype=jnp.float32)
                adapters[stack][f"{name}_b"] = array(*sizes, RANK, outputs, dtype=jnp.float32)
        return (adapters, weights) if self.lora else (weights, adapters)

    def sharding(self, array: jax.ShapeDtypeStruct) -> NamedSharding:
        """How a weight, or the state of the optimizer of it, is split: along its largest dimension, not by layers."""
        spec: list[str | None] = [None] * array.ndim
        if prod(array.shape) >= SMALL:
            spec[max(range(array.ndim - 2, array.ndim), key=array.shape.__getitem__)] = "data"
        return NamedSharding(self.mesh, P(*spec))

    # ---- Forward ----

    @part(LAYER)
    def linear(self, layer: _Arrays, name: str, hidden: jax.Array) -> jax.Array:
        """Apply a matrix of a layer, with its adapter."""
        hidden = hidden.astype(self.dtype)
        made = hidden @ layer[name].astype(self.dtype)
        return made + self.adapter(layer, name, hidden) if self.lora else made

    @part(ADAPTERS)
    def adapter(self, layer: _Arrays, name: str, hidden: jax.Array) -> jax.Array:
        """Apply the adapter of a matrix."""
        first, second = (layer[f"{name}_{letter}"].astype(self.dtype) for letter in "ab")
        return (hidden @ first) @ second * SCALE

    @part(ROPE_AND_NORMS)
    def norm(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Normalize in float32."""
        weight = 1.0 + weight if self.is_gemma else weight
        return rms_norm(hidden.astype(jnp.float32), weight, self.config["rms_norm_eps"]).astype(hidden.dtype)

    @part(ROPE_AND_NORMS)
    def attention(self, layer: _Arrays, kind: str, hidden: jax.Array) -> jax.Array:
        """Attention of a layer."""
        rope = self.config["rope_parameters"]
        angles = make_angles(self.length, self.head_dim, rope.get(kind, rope)["rope_theta"])

        def heads(name: str) -> jax.Array:
            made = self.linear(layer, f"{name}_proj", hidden)
            if f"{name}_bias" in layer:
                made += layer[f"{name}_bias"].astype(self.dtype)
            made = made.reshape(*hidden.shape[:2], -1, self.head_dim)
            return self.norm(made, layer[f"{name}_norm"]) if f"{name}_norm" in layer else made

        query, key = (rotate(heads(name).astype(jnp.float32), *angles).astype(self.dtype) for name in "qk")
        by_heads = partial(jnp.swapaxes, axis1=1, axis2=2)
        scale = (self.config.get("query_pre_attn_scalar") or self.head_dim) ** -0.5
        attend = jax.named_scope(kind)(part(ATTENTION)(self.attend(kind)))
        made = attend(by_heads(query * scale), by_heads(key), by_heads(heads("v")))
        return self.linear(layer, "o_proj", by_heads(made).reshape(*hidden.shape[:2], -1))

    @part(LAYER)
    def mlp(self, layer: _Arrays, hidden: jax.Array) -> jax.Array:
        """MLP of a layer."""
        gate = (jax.nn.gelu if self.is_gemma else jax.nn.silu)(self.linear(layer, "gate_proj", hidden))
        return self.linear(layer, "down_proj", gate * self.linear(layer, "up_proj", hidden))

    @part(HEAD)
    def loss_sum(self, hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
        """Sum of the cross entropy, of one block of tokens after the other, whose logits the backward pass makes again."""

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def block(total, batch):
            hidden, labels = batch
            logits = jnp.dot(hidden, head.astype(self.dtype).T, preferred_element_type=jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
            return total + losses.sum(where=labels >= 0), None

        blocks = hidden.astype(self.dtype).reshape(-1, self.block, hidden.shape[-1]), labels.reshape(-1, self.block)
        total, _ = jax.lax.scan(block, jnp.zeros(()), blocks)
        return jax.lax.psum(total, "data")

    def loss(self, trained: _Arrays, frozen: _Arrays, input_ids: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean cross entropy of the labels that are not -100; each is that of the next token."""
        weights = frozen | trained | {stack: frozen[stack] | trained[stack] for stack in self.stacks}
        head = weights.get("lm_head", weights["embed_tokens"])
        by_rows = NamedSharding(self.mesh, P("data"))

        def layers(hidden, stack, in_scan):
            """Layers from the first of a period on, each of which is computed again for the backward pass."""
            for number in range(len(stack["q_proj"])):

                @partial(jax.checkpoint, policy=POLICIES[self.rematerialization], prevent_cse=not in_scan)
                def apply(hidden, layer, kind=self.kinds[number]):
                    if self.mesh.size > 1:
                        # Weights are gathered before their products, which the compiler would do part by part otherwise, and slower.
                        layer = jax.lax.with_sharding_constraint(layer, NamedSharding(self.mesh, P()))
                    made = self.attention(layer, kind, self.norm(hidden, layer["input_layernorm"]))
                    if self.is_gemma:
                        hidden += self.norm(made, layer["post_attention_layernorm"])
                        made = self.mlp(layer, self.norm(hidden, layer["pre_feedforward_layernorm"]))
                        hidden += self.norm(made, layer["post_feedforward_layernorm"])
                    else:
                        hidden += made
                        hidden += self.mlp(layer, self.norm(hidden, layer["post_attention_layernorm"]))
                    return jax.lax.with_sharding_constraint(hidden, by_rows)

                hidden = apply(hidden, {name: array[number] for name, array in stack.items()})
            return hidden

        hidden = jax.lax.with_sharding_constraint(weights["embed_tokens"][input_ids], by_rows)
        if self.is_gemma:
            hidden *= jnp.asarray(self.config["hidden_size"] ** 0.5, hidden.dtype)
        hidden, _ = jax.lax.scan(lambda hidden, stack: (layers(hidden, stack, True), None), hidden, weights["layers"])
        if "rest" in weights:
            hidden = layers(hidden, weights["rest"], False)
        total = self.on_chips(self.loss_sum, P("data"), P(), P("data"), P())
        return total(self.norm(hidden, weights["norm"]), head, labels) / (labels >= 0).sum()

    # ---- Training ----

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW, with gradients clipped, as `Trainer` has it by default."""
        schedule = optax.linear_schedule(2e-5, 0.0, 1000)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    def update(self, trained: _Arrays, state: Any, frozen: _Arrays, input_ids: jax.Array, labels: jax.Array) -> tuple:
        """One step: the trained weights and the state after it, and the loss."""
        loss, gradients = jax.value_and_grad(self.loss)(trained, frozen, input_ids, labels)
        with part(OPTIMIZER):
            changes, state = self.optimizer.update(gradients, state, trained)
            return optax.apply_updates(trained, changes), state, loss

    def compile(self) -> jax.stages.Compiled:
        """Compile the step for the chips of the mesh."""
        trained, frozen = self.shapes
        state = jax.eval_shape(self.optimizer.init, trained)
        shardings = [jax.tree.map(self.sharding, arrays) for arrays in (trained, state, frozen)]
        batch = jax.ShapeDtypeStruct((self.rows, self.length), jnp.int32)
        by_rows = NamedSharding(self.mesh, P("data"))
        step = jax.jit(
            self.update,
            in_shardings=(*shardings, by_rows, by_rows),
            out_shardings=(*shardings[:2], NamedSharding(self.mesh, P())),
            donate_argnums=(0, 1),
        )
        # As for an export: kernels are written in the version that this libtpu reads.
        written = mlir.LoweringParameters(for_export=True)
        return step.trace(trained, state, frozen, batch, batch).lower(_private_parameters=written).compile()


def main(directory: Path) -> None:
    """Compile the step of a directory."""
    options = json.loads((directory / "options.json").read_text(encoding="utf-8"))
    chips = topologies.get_topology_desc(platform="tpu", **options.pop("topology")).devices
    step = Step(**options, mesh=Mesh(np.array(chips), "data"))
    write_compiled(lambda: step.compile().runtime_executable(), directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
