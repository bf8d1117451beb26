"""The compiler for TPU, in processes of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import psutil

from ..errors import UserError
from ..formatting import format_bytes
from ..hardware.topologies import Topology
from .hlo import argument_shapes
from .programs import CompiledProgram, TracedProgram


_SCRIPT = Path(__file__).with_name("tpu_compiler.py")
# What a compilation takes of the host's memory, but where layers have kernels each. Of the cores it takes one.
_HOST_BYTES = 5 * 2**30
# Seconds between two looks at whether a compilation is still wanted.
_LOOKS_EVERY = 0.2


def jobs_at_once() -> int:
    """How many programs to compile at once on this machine, by its cores and its free memory."""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // _HOST_BYTES))


def compile_programs(
    programs: Sequence[TracedProgram], topology: Topology, jobs: int = 1, stop: Event | None = None
) -> Iterator[CompiledProgram]:
    """
    Compile programs for a TPU, so many `jobs` at once. Yields each as soon as it and those before it are compiled.
    Raises `ValueError` where the compiler was stopped, which is mostly for want of memory, or does not know the
    topology. Compilers end when the event `stop` is set.
    """
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda program: _compile(program, topology, stop), programs)


def _compile(program: TracedProgram, topology: Topology, stop: Event | None) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "program.pb").write_bytes(program.module)
        arguments = list(enumerate(program.arguments))
        options = {
            "topology": topology.compiler_options,
            "donated": [index for index, argument in arguments if argument.is_donated],
            "shardings": {index: argument.sharding for index, argument in arguments if argument.sharding is not None},
        }
        (directory / "options.json").write_text(json.dumps(options), encoding="utf-8")
        command = [sys.executable, str(_SCRIPT), name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output = None
        while output is None:
            try:
                output, _ = process.communicate(timeout=_LOOKS_EVERY)
            except subprocess.TimeoutExpired:
                if stop is not None and stop.is_set():
                    process.kill()
        if process.returncode:
            raise UserError(_why_stopped(process.returncode, output, topology))
        result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
        make = partial(CompiledProgram, program.kind, program.batch_shape, result["seconds"])
        if "error" in result:
            return make(result["error"], arguments=program.resident)
        text = (directory / "optimized.txt").read_text(encoding="utf-8")
    bytes_by_role: Counter[str] = Counter()
    for argument, shape in zip(program.arguments, argument_shapes(text), strict=True):
        bytes_by_role[argument.role] += shape.num_bytes
    return make(memory=result["memory"], arguments=dict(bytes_by_role), text=text)


def _why_stopped(status: int, output: str, topology: Topology) -> str:
    if status == -signal.SIGKILL:
        free = format_bytes(psutil.virtual_memory().available)
        return (
            f"The TPU compiler was killed, probably out of memory ({free} are free). Plan on a machine with more "
            "memory, compile one graph at a time (--jobs 1), or, where layers do not run as a loop, --attention slices"
        )
    return f"The TPU compiler failed for {topology.name}:\n{output.strip()[-2000:]}"
