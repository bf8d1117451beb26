"""
Prints the loss of a model and a batch by the step in JAX, and the norm of its gradients; kernels are interpreted on the CPU in float32:

    python jax_step_driver.py DIRECTORY

The directory has a model in the form of Hugging Face, and `batch.safetensors` with `input_ids` and `labels` that are shifted.
"""

import json
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax_step import Step
from safetensors.numpy import load_file


directory = Path(sys.argv[1])
config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
saved, batch = (load_file(directory / f"{name}.safetensors") for name in ("model", "batch"))
mesh = Mesh(np.array(jax.devices()[:1]), "data")
step = Step(config, *batch["input_ids"].shape, False, "full", 128, mesh, interpret=True, dtype=jnp.float32)


def find(name: str) -> np.ndarray:
    """The weight of a name, stacked by layers."""
    ending = f".{name[0]}_proj.bias" if name.endswith("_bias") else f".{name}.weight"
    found = [saved[key] for key in sorted(saved) if f".{key}".endswith(ending)]
    return np.stack([array.T for array in found] if name in step.matrices else found)


trained, frozen = step.shapes
weights = {name: find(name)[0] for name in trained if name not in step.stacks}
first = 0
for stack, sizes in step.stacks.items():
    last = first + prod(sizes)
    weights[stack] = {
        name: (found := find(name)[first:last]).reshape(*sizes, *found.shape[1:]) for name in trained[stack]
    }
    first = last
loss, gradients = jax.jit(jax.value_and_grad(step.loss))(weights, frozen, batch["input_ids"], batch["labels"])
print(json.dumps([float(loss), float(optax.global_norm(gradients))]))
