"""
The yardstick outside of PyTorch: the same step written by hand in JAX and Optax. `step_overhead.py` runs it, in a process
that does not import torch.
"""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from meter import Meter, Plan
from safetensors.numpy import load_file


def rms_norm(hidden: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """
    Normalize by the root of the mean square.

    Args:
        hidden (`jax.Array` of shape `(..., width)`):
            What is normalized.
        weight (`jax.Array` of shape `(width,)`):
            Scale of each number.
        eps (`float`):
            What is added to the mean square.

    Returns:
        `jax.Array`: Of the shape of `hidden`.
    """
    return weight * hidden * jax.lax.rsqrt(jnp.square(hidden).mean(-1, keepdims=True) + eps)


def make_angles(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """
    Make the cosines and sines that queries and keys are turned by.

    Args:
        length (`int`):
            Tokens of a row.
        head_dim (`int`):
            Width of a head.
        theta (`float`):
            Base of the wavelengths.

    Returns:
        `tuple[jax.Array, jax.Array]`: Each of shape `(1, length, 1, head_dim / 2)`.
    """
    angles = jnp.outer(jnp.arange(length), theta ** (-jnp.arange(0, head_dim, 2) / head_dim))[None, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """
    Turn queries or keys by their positions.

    Args:
        heads (`jax.Array` of shape `(batch, length, num_heads, head_dim)`):
            Queries or keys.
        cos, sin (`jax.Array` of shape `(1, length, 1, head_dim / 2)`):
            From [`make_angles`].

    Returns:
        `jax.Array`: Of the shape of `heads`.
    """
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def forward(weights: dict[str, jax.Array], input_ids: jax.Array, config: dict[str, Any]) -> jax.Array:
    """
    Run a Qwen3 model. Rows are padded on the right, so the causal mask hides the padding from every token.

    Args:
        weights (`dict[str, jax.Array]`):
            Its weights, by their names in the checkpoint.
        input_ids (`jax.Array` of shape `(batch, length)`):
            Tokens.
        config (`dict[str, Any]`):
            Its `config.json`.

    Returns:
        `jax.Array` of shape `(batch, length, vocab_size)`: Logits.
    """
    batch, length = input_ids.shape
    head_dim, theta = config["head_dim"], config["rope_parameters"]["rope_theta"]
    angles = make_angles(length, head_dim, theta)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))

    def norm(hidden: jax.Array, name: str) -> jax.Array:
        return rms_norm(hidden, weights[f"{name}.weight"], config["rms_norm_eps"])

    def linear(hidden: jax.Array, name: str) -> jax.Array:
        return hidden @ weights[f"{name}.weight"].T

    def heads(hidden: jax.Array, name: str) -> jax.Array:
        return linear(hidden, name).reshape(batch, length, -1, head_dim)

    def attention(hidden: jax.Array, name: str) -> jax.Array:
        query = rotate(norm(heads(hidden, f"{name}.q_proj"), f"{name}.q_norm"), *angles)
        key = rotate(norm(heads(hidden, f"{name}.k_proj"), f"{name}.k_norm"), *angles)
        # Each head of keys and values serves a group of queries that stand side by side.
        query = query.reshape(batch, length, config["num_key_value_heads"], -1, head_dim)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key) / head_dim**0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        values = jnp.einsum("bhgqk,bkhd->bqhgd", shares, heads(hidden, f"{name}.v_proj"))
        return linear(values.reshape(batch, length, -1), f"{name}.o_proj")

    def mlp(hidden: jax.Array, name: str) -> jax.Array:
        gate = jax.nn.silu(linear(hidden, f"{name}.gate_proj"))
        return linear(gate * linear(hidden, f"{name}.up_proj"), f"{name}.down_proj")

    hidden = weights["model.embed_tokens.weight"][input_ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        hidden += attention(norm(hidden, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        hidden += mlp(norm(hidden, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
    return linear(norm(hidden, "model.norm"), "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head")


def mean_loss(
    weights: dict[str, jax.Array], input_ids: jax.Array, attention_mask: jax.Array, config: dict[str, Any]
) -> jax.Array:
    """
    Mean cross entropy of the next tokens.

    Args:
        weights (`dict[str, jax.Array]`):
            As in [`forward`].
        input_ids (`jax.Array` of shape `(batch, length)`):
            Tokens.
        attention_mask (`jax.Array` of shape `(batch, length)`):
            1 for tokens, 0 for padding.
        config (`dict[str, Any]`):
            As in [`forward`].

    Returns:
        `jax.Array`: The loss.
    """
    logits = forward(weights, input_ids, config)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, input_ids[:, 1:])
    return losses.mean(where=attention_mask[:, 1:] == 1)


def make_batches(plan: Plan, pad_token_id: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """
    Pad the rows of a plan, again and again.

    Args:
        plan ([`Plan`]):
            What is trained.
        pad_token_id (`int`):
            What rows are padded with.

    Yields:
        `tuple[np.ndarray, np.ndarray]`: `input_ids` and `attention_mask` of shape `(batch, length)`.
    """
    rows = itertools.cycle(plan.rows)
    while True:
        ids = [next(rows)["input_ids"] for _ in range(plan.batch_size)]
        input_ids = np.full((plan.batch_size, plan.max_length), pad_token_id, np.int32)
        attention_mask = np.zeros_like(input_ids)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = tokens
            attention_mask[row, : len(tokens)] = 1
        yield input_ids, attention_mask


def train(plan: Plan, connection: Connection) -> None:
    """Train in float32, one program a step."""
    jax.config.update("jax_default_matmul_precision", "highest")
    counts = Counter(compiles=0, executions=0, reads=0)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: counts.update(compiles=event == "/jax/core/compile/backend_compile_duration")
    )
    config = json.loads((plan.model_dir / "config.json").read_text(encoding="utf-8"))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.0, plan.learning_rate, plan.logging_steps), weight_decay=0.0),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(weights, state, *batch):
        loss, gradients = jax.value_and_grad(mean_loss)(weights, *batch, config)
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, loss

    weights = jax.device_put(load_file(plan.model_dir / "model.safetensors"))
    state = jax.jit(optimizer.init)(weights)
    meter = Meter(plan, connection, counts.copy, lambda: jax.block_until_ready(weights))
    losses, unread = {}, []
    for step, batch in zip(range(plan.total_steps), make_batches(plan, config["pad_token_id"]), strict=False):
        meter.step_begins(step)
        weights, state, loss = update(weights, state, *batch)
        counts["executions"] += 1
        unread.append(loss)
        if (step + 1) % plan.logging_steps == 0:
            losses[step + 1] = float(np.mean(jax.device_get(unread)))
            counts["reads"] += len(unread)
            unread.clear()
    meter.finish(losses, ", ".join(f"{name} {version(name)}" for name in ("jax", "optax")))


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        train(connection.recv(), connection)
