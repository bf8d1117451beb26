"""The training programs of eight chips, compiled for a TPU v5e-8."""

import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forked
import pytest
from schemes import Program, Run, make_inputs

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.compiler import compile_programs
from hf_tpu_ext.plan.programs import Argument, TracedProgram
from hf_tpu_ext.sharding.plan import PlannedParameter


HERE = Path(__file__).parent
# Smaller weights are not worth it to the compiler to be summed up in parts.
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@dataclass(frozen=True)
class TPUProgram(Program):
    """
    A program that the TPU compiler made.

    Args:
        text (`str`):
            Its optimized HLO.
        weights (`frozenset[tuple[int, ...]]`):
            As in [`Program`].
        memory (`dict[str, int]`):
            Bytes of a chip's memory that its `argument`s, `output`s, ... take; `alias` is what outputs share with arguments.
    """

    memory: dict[str, int]


@pytest.fixture(scope="session")
def traced(tmp_path_factory) -> dict[str, dict]:
    """What `trace_schemes.py` writes."""
    directory = tmp_path_factory.mktemp("eight_chips")
    make_inputs(directory, **SIZES)
    done = forked.run(
        [sys.executable, HERE / "trace_schemes.py", directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail(f"Tracing failed:\n{done.stdout}", pytrace=False)
    return json.loads((directory / "traced.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def runs(traced) -> dict[str, Run]:
    """Parameters of each scheme."""
    return {
        name: Run(found["mesh"], [PlannedParameter(**values) for values in found["parameters"]])
        for name, found in traced.items()
    }


@pytest.fixture(scope="session")
def compile_for_tpu(traced, runs):
    """Compiles a program of a scheme, once, and gives the [`TPUProgram`] of one chip."""
    programs: dict[tuple[str, str], TPUProgram] = {}

    def compile_program(scheme: str, kind: str) -> TPUProgram:
        if (scheme, kind) not in programs:
            (values,) = (values for values in traced[scheme]["programs"] if values["kind"] == kind)
            values = values | {
                "module": base64.b64decode(values["module"]),
                "arguments": [Argument(**argument) for argument in values["arguments"]],
                "batch_shape": tuple(values["batch_shape"]),
            }
            (compiled,) = compile_programs([TracedProgram(**values)], find_topology("v5e-8"))
            assert compiled.error is None
            programs[scheme, kind] = TPUProgram(compiled.text, runs[scheme].weight_shapes, compiled.memory)
            megabytes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in compiled.memory.items())
            print(f"\n{scheme}, {kind}: {megabytes}")
        return programs[scheme, kind]

    return compile_program
