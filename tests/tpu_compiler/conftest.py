"""The training programs of eight devices, compiled for a TPU v5e-8 by the TPU compiler in an environment of its own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from hlo import Program  # noqa: E402
from schemes import SCHEMES, Run, make_inputs, run_schemes  # noqa: E402


ENVIRONMENT = HERE.parents[1] / ".venv-tpu-compiler"
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


def run_command(*command) -> str:
    """Run a command; its output becomes the error if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} failed:\n{done.stdout}", pytrace=False)
    return done.stdout


@pytest.fixture(scope="session")
def compiler():
    """Python of the environment with the TPU compiler. Made as `make tpu-compiler` makes it, if it is not there."""
    python, installed = ENVIRONMENT / "bin" / "python", ENVIRONMENT / ".installed"
    if not installed.exists():
        run_command(sys.executable, "-m", "venv", ENVIRONMENT)
        run_command(python, "-m", "pip", "install", "-r", HERE / "requirements.txt")
        installed.touch()
    return python


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Run]:
    """What each scheme compiles on eight devices of the host."""
    directory = tmp_path_factory.mktemp("eight_chips")
    make_inputs(directory, **SIZES)
    return run_schemes(list(SCHEMES), directory)


@pytest.fixture(scope="session")
def compile_for_tpu(compiler, runs, tmp_path_factory):
    """Compiles a program of a scheme for `v5e:2x4`, once, and gives the [`TPUProgram`] of one chip."""
    directory = tmp_path_factory.mktemp("tpu_programs")
    programs: dict[tuple[str, str], TPUProgram] = {}

    def compile_program(scheme: str, kind: str) -> TPUProgram:
        if (scheme, kind) not in programs:
            run, optimized = runs[scheme], directory / f"{scheme}.{kind}.txt"
            printed = run_command(compiler, HERE / "compiler.py", run.dumps[kind], optimized)
            memory = json.loads(printed.splitlines()[-1])
            program = TPUProgram(optimized.read_text(encoding="utf-8"), run.weight_shapes, memory)
            programs[scheme, kind] = program
            megabytes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in memory.items())
            print(f"\n{scheme}, {kind}: {megabytes}")
        return programs[scheme, kind]

    return compile_program
