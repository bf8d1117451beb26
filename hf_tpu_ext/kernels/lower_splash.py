"""
Lowers jax's splash attention, forward and backward, to HLO.

A process of its own, for jax never to be loaded beside torch_xla. It may be another Python, with jax alone, so nothing of this
package is imported. Started by [`~hf_tpu_ext.kernels.splash.lower`]:

    python lower_splash.py DIRECTORY

It takes `request.json` from the directory, the fields of a [`~hf_tpu_ext.kernels.splash.SplashAttention`], and writes a
`HloModuleProto` for each of its programs: `infer.pb`, `forward.pb`, `backward.pb`. Neither a TPU nor libtpu is needed.
"""

import json
import math
import os
import sys
from functools import partial
from pathlib import Path


os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax._src import cloud_tpu_init, config
from jax._src.lib import xla_client
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask


# Scores are computed by blocks of queries and keys. Those that the mask leaves out are skipped, so larger blocks compute more in
# vain; smaller ones start more often.
_LARGEST_BLOCK = 512
_LANES = 128
# Products of a block in a kernel. Forward: scores, weighted values. The two kernels of the backward pass, between which the sum is
# halved: scores, and the gradients of values, probabilities and keys; scores, and the gradients of probabilities and queries.
_PRODUCTS = {"forward": 2, "backward": (4 + 3) / 2}


def make_kernel(request: dict, save_residuals: bool):
    """Make jax's kernel for rows of a length that is a multiple of the lanes of a TPU."""
    length = padded_length(request)
    block = max(size for size in range(_LANES, min(_LARGEST_BLOCK, length) + 1, _LANES) if length % size == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    window = request["window"]
    shape = (length, length)
    if not request["causal"]:
        mask = splash_attention_mask.FullMask(shape)
    elif window is None or window >= length:
        mask = splash_attention_mask.CausalMask(shape)
    else:
        # transformers' window has the token itself, and those before it.
        mask = splash_attention_mask.LocalMask(shape, (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():
        return splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * request["heads"]),
            block_sizes=splash_attention_kernel.BlockSizes(**{f"block_{name}": block for name in names}),
            head_shards=1,
            q_seq_shards=1,
            save_residuals=save_residuals,
            attn_logits_soft_cap=request["soft_cap"],
            interpret=request["platform"] == "cpu",
        )


def padded_length(request: dict) -> int:
    """The length that the kernel computes with."""
    return math.ceil(request["length"] / _LANES) * _LANES


def _scope(request: dict, kernel, products: str):
    """Names what is traced in it by its arithmetic, for whoever reads the program: the kernel's own text does not say."""
    blocks, length = kernel.fwd_mask_info.block_mask, padded_length(request)
    scores = length**2
    if blocks is not None:
        # The same for all heads. The mask has no blocks beside a window.
        scores = np.count_nonzero(np.asarray(blocks)[0]) * kernel.kwargs["block_sizes"].block_q ** 2
    scores *= request["rows"] * request["heads"]
    # The matrix units take as long for narrower heads.
    depth = math.ceil(request["head_dim"] / _LANES) * _LANES
    return jax.named_scope(f"attention_kernel[flops={int(2 * depth * scores * _PRODUCTS[products])}]")


def _pad(request: dict, *tensors):
    """Rows of the kernel's length. What is added belongs to no document of the row's."""
    more = padded_length(request) - request["length"]
    for tensor in tensors:
        by_token = tensor.ndim - (2 if tensor.ndim == 4 else 1)
        widths = [(0, more if dim == by_token else 0) for dim in range(tensor.ndim)]
        yield jnp.pad(tensor, widths) if more else tensor


def forward(request: dict, save_residuals: bool, query, key, value, ids):
    """
    Attention of `(rows, heads, length, head_dim)`, already scaled, among tokens of the same number in `ids`, `(rows, length)`;
    with residuals also the logarithms of the sums of exponentials, `(rows, heads, length)`.
    """
    kernel = make_kernel(request, save_residuals)
    query, key, value, ids = _pad(request, query, key, value, ids)

    def attend(query, key, value, ids):
        return kernel(query, key, value, segment_ids=splash_attention_kernel.SegmentIds(ids, ids))

    with _scope(request, kernel, "forward"):
        results = jax.vmap(attend)(query, key, value, ids)
    length = request["length"]
    if not save_residuals:
        return (results[:, :, :length],)
    output, (sums,) = results
    return output[:, :, :length], sums[:, :, :length]


def backward(request: dict, query, key, value, ids, output, sums, gradient):
    """Gradients of query, key and value, from what [`forward`] took and gave."""
    kernel = make_kernel(request, False)
    tensors = tuple(_pad(request, query, key, value, ids, output, sums, gradient))
    names = "mask_value is_mqa block_sizes residual_checkpoint_name mask_function attn_logits_soft_cap interpret"
    settings = [kernel.kwargs[name] for name in names.split()]

    def differentiate(query, key, value, ids, output, sums, gradient):
        # What jax's own rule for derivatives calls with the residuals of its forward pass. It is here a program of its own.
        residuals = (
            *(query, key, value, splash_attention_kernel.SegmentIds(ids, ids), None, output, sums),
            *(kernel.dq_mask_info, kernel.dkv_mask_info),
        )
        return splash_attention_kernel._splash_attention_bwd(False, *settings, residuals, gradient)[3:6]

    with _scope(request, kernel, "backward"):
        gradients = jax.vmap(differentiate)(*tensors)
    return tuple(padded_gradient[:, :, : request["length"]] for padded_gradient in gradients)


def lower(function, platform: str, arguments: list) -> bytes:
    """Lower a function to a serialized `HloModuleProto` with the same bytes in every process."""
    # On a machine with TPUs, jax on the CPU would take its own version for that of libtpu, and refuse.
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    # Without the lines of Python that lead here: they would be part of the kernel, and so of the hash of the program.
    with config.traceback_in_locations_limit(0):
        # As exports are lowered, libtpu can read it: plainly lowered kernels are of a newer version.
        program = jax.export.export(jax.jit(function, keep_unused=True), platforms=[platform])(*arguments)
    computation = xla_client._xla.mlir.mlir_module_to_xla_computation(
        program.mlir_module_serialized, use_tuple_args=False, return_tuple=True
    )
    return computation.as_serialized_hlo_module_proto()


def main(directory: Path) -> None:
    """Lower the programs of a request."""
    request = json.loads((directory / "request.json").read_text(encoding="utf-8"))
    jax.config.update("jax_use_shardy_partitioner", False)
    dtype = jnp.dtype(request["dtype"])
    rows, heads, length = request["rows"], request["heads"], request["length"]
    query = jax.ShapeDtypeStruct((rows, heads, length, request["head_dim"]), dtype)
    key = jax.ShapeDtypeStruct((rows, request["kv_heads"], length, request["head_dim"]), dtype)
    inputs = [query, key, key, jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    outputs = [query, jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)]
    programs = {
        "infer": (partial(forward, request, False), inputs),
        "forward": (partial(forward, request, True), inputs),
        "backward": (partial(backward, request), [*inputs, *outputs, query]),
    }
    for name, (function, arguments) in programs.items():
        (directory / f"{name}.pb").write_bytes(lower(function, request["platform"], arguments))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
