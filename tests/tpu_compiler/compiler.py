"""
Compiles a dumped XLA program with the compiler for TPU, on a machine without one.

    .venv-tpu-compiler/bin/python tests/tpu_compiler/compiler.py PROGRAM OPTIMIZED

It has an environment of its own (`make tpu-compiler`), since its versions of jax and libtpu are not those of torch_xla. Prints,
as JSON, what the program takes of a chip's memory.
"""

import argparse
import json
import os
import re
from pathlib import Path


# No TPU is to be looked for, neither on this machine nor at a metadata server, and one that is in use may stay so.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import numpy as np  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax._src.lib import xla_client  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jaxlib import _hlo  # noqa: E402
from jaxlib.mlir import ir  # noqa: E402


TOPOLOGY = "v5e:2x4"


def read_program(text: str) -> ir.Module:
    """
    Take up a program as XLA dumps it before optimizations.

    Args:
        text (`str`):
            HLO with shardings.

    Returns:
        `ir.Module`: The same program as StableHLO.
    """
    computation = xla_client.XlaComputation(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    with mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
        # The conversion drops which arguments may be overwritten by results.
        donated = re.findall(r"\((\d+), \{\}\)", text.partition("entry_computation_layout")[0])
        main = next(function for function in module.body.operations if function.name.value == "main")
        arguments = [{entry.name: entry.attr for entry in argument} for argument in main.attributes["arg_attrs"]]
        for index in map(int, donated):
            arguments[index]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(argument) for argument in arguments])
    return module


def compile_program(module: ir.Module) -> xla_client.Executable:
    """
    Compile for all chips of [`TOPOLOGY`].

    Args:
        module (`ir.Module`):
            The program.

    Returns:
        `xla_client.Executable`: The program of one chip.
    """
    chips = topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for holder in (options, build):
        holder.num_replicas, holder.num_partitions = 1, len(chips)
    build.use_spmd_partitioning = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(chips)).reshape(1, -1))
    # As torch_xla has it: where a result is, the partitioner decides.
    build.allow_spmd_sharding_propagation_to_output = [True]
    return chips[0].client.compile(module, xla_client.DeviceList(tuple(chips)), options)


def main() -> None:
    """Compile one program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="HLO as XLA dumps it before optimizations")
    parser.add_argument("optimized", type=Path, help="where to write the program that the compiler made of it")
    arguments = parser.parse_args()
    executable = compile_program(read_program(arguments.program.read_text(encoding="utf-8")))
    arguments.optimized.write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    memory = executable.get_compiled_memory_stats()
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    print(json.dumps({kind: getattr(memory, f"{kind}_size_in_bytes") for kind in kinds}))


if __name__ == "__main__":
    main()
