"""
Compiles a program with the compiler for TPU, on a machine without one.

A process of its own, for jax and libtpu never to be loaded beside torch_xla; so nothing of this package is imported. Started by [`~hf_tpu_ext.plan.compiler.compile_programs`]:

    python tpu_compiler.py DIRECTORY

It takes `program.pb` and `options.json` from the directory and writes `optimized.txt` and `result.json`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


# No TPU is to be looked for, neither on this machine nor at a metadata server, and one that is in use may stay so.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
MEMORY = ("argument", "output", "alias", "generated_code")


def set_environment() -> None:
    """Set what libtpu reads when it is loaded, to compile and do nothing else."""
    os.environ |= ENVIRONMENT
    # torch_xla leaves the path of another libtpu there.
    os.environ.pop("TPU_LIBRARY_PATH", None)


def read_program(module: bytes, donated_places: list[int], shardings: dict[int, str]) -> bytes:
    """
    Make StableHLO of a serialized `HloModuleProto`: with the indices of arguments that results may take the place of,
    and how arguments are split over the chips, as HLO writes it, where the module does not say.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    computation = xla_client.XlaComputation(module)
    with mlir.make_ir_context():
        program = ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
        mark_arguments(program, donated_places, shardings)
        return mlir.module_to_bytecode(program)


def mark_arguments(program, donated_places: list[int], shardings: dict[int, str]) -> None:
    """Say in a module of StableHLO what [`read_program`] is told of its arguments. In the context of the module."""
    from jaxlib.mlir import ir

    main = next(function for function in program.body.operations if function.name.value == "main")
    if "arg_attrs" in main.attributes:
        arguments = [{entry.name: entry.attr for entry in argument} for argument in main.attributes["arg_attrs"]]
    else:
        arguments = [{} for _ in main.regions[0].blocks[0].arguments]
    for index in donated_places:
        arguments[index]["jax.buffer_donor"] = ir.BoolAttr.get(True)
    for index, sharding in shardings.items():
        arguments[index]["mhlo.sharding"] = ir.StringAttr.get(sharding)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(argument) for argument in arguments])


def compile_program(program: bytes, topology: dict):
    """Compile StableHLO for the chips of a topology, given as for `jax.experimental.topologies.get_topology_desc`."""
    import numpy as np
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", **topology).devices
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    for holder in (options, build):
        holder.num_replicas, holder.num_partitions = 1, len(chips)
    build.use_spmd_partitioning = len(chips) > 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(chips)).reshape(1, -1))
    # torch_xla compiles the same way: the partitioner decides where a result is.
    build.allow_spmd_sharding_propagation_to_output = [True]
    return chips[0].client.compile(program, xla_client.DeviceList(tuple(chips)), options)


def write_compiled(compile_it: Callable[[], Any], directory: Path) -> None:
    """Write what the compiler makes of a program, or its error, and the time that it takes."""
    from jax.errors import JaxRuntimeError

    start = time.monotonic()
    try:
        executable = compile_it()
    except JaxRuntimeError as error:
        result = {"error": str(error)}
    else:
        stats = executable.get_compiled_memory_stats()
        memory = {kind: getattr(stats, f"{kind}_size_in_bytes") for kind in MEMORY}
        # Not `temp_size_in_bytes`: it has tensors that take each other's place side by side, and the compiler takes programs
        # that would not fit by it.
        memory["temp"] = stats.peak_memory_in_bytes - memory["argument"] - (memory["output"] - memory["alias"])
        result = {"memory": memory}
        (directory / "optimized.txt").write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    result["seconds"] = time.monotonic() - start
    (directory / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main(directory: Path) -> None:
    """Compile the program of a directory, where the result goes, too."""
    options = json.loads((directory / "options.json").read_text(encoding="utf-8"))
    set_environment()
    shardings = {int(index): sharding for index, sharding in options["shardings"].items()}
    program = read_program((directory / "program.pb").read_bytes(), options["donated"], shardings)
    write_compiled(lambda: compile_program(program, options["topology"]), directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
