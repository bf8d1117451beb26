"""
What the compiler for TPU makes of a training step of this package, beside one of the same model, batch and rematerialization
written by hand in JAX (`jax_step.py`): the cycles that it estimates, memory, and the time to compile.

    python tests/benchmarks/tpu_beside_jax.py [--only WORDS] [--write-docs]

Models are given by their configuration alone; nothing is downloaded and nothing is run. With `--write-docs` the table goes into
docs/plan.md.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from parts import cycles_by_part
from tables import make_parser, publish
from tpu_plans import DOCUMENT, LORA, ROOT, Case, keep_rows, make_model, plan

from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.kernels.versions import required_versions
from hf_tpu_ext.plan.hlo_cost import measure_cost


# Of tokens, in the step in JAX.
BLOCK = 512
FULL = {"rematerialization": "full"}
# The step in JAX has no dropout.
ADAPTERS = LORA | {"lora_dropout": "0"}


def _case(rows: int, length: int, kind: str = "LoRA", model: str = "Qwen3-0.6B", **settings: str) -> Case:
    settings = FULL | settings
    title = f"{kind}, {rows} x {length}, {settings['rematerialization']} rematerialization"
    adapters = ADAPTERS if kind == "LoRA" else {}
    topology = "v5e-8" if "mesh" in settings else "v5e-1"
    return Case(title, model, topology, length, adapters | {"per_device_train_batch_size": str(rows)} | settings)


CASES = [
    _case(4, 1024),
    _case(1, 8192),
    _case(1, 32768),
    _case(32, 1024),
    _case(4, 1024, rematerialization="dots"),
    _case(4, 1024, "full"),
    _case(4, 1024, model="Gemma-3-1B"),
    _case(1, 8192, model="Gemma-3-1B"),
    _case(4, 1024, "full, dtype: bfloat16", "Gemma-3-1B", dtype="bfloat16"),
    _case(1, 8192, "full, dtype: bfloat16", "Gemma-3-1B", dtype="bfloat16"),
    _case(4, 1024, model="Qwen2.5-7B", mesh="fsdp"),
]


# Matrix products of jax's splash attention, by what is in the names of its kernels.
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}


@dataclass(frozen=True)
class Program:
    """
    A compiled training step.

    Args:
        cycles (`dict[str, int]`):
            As the compiler estimates them for a step on one chip, by part of the model, with the turns of loops.
        kernel_cycles (`int`):
            What kernels take at the peak rate: the compiler has no estimate of them.
        temporary_bytes (`int`):
            What a chip holds besides arguments and results.
        cpu_seconds (`float`):
            Processor time to compile.
    """

    cycles: dict[str, int]
    kernel_cycles: int
    temporary_bytes: int
    cpu_seconds: float

    def row(self, *first: str) -> str:
        """Write the row of a Markdown table, after its first cells."""
        parts = ", ".join(f"{name} {cycles / 1e6:.0f}" for name, cycles in self.cycles.items() if cycles > 5e5)
        cycles = [f"{number / 1e6:.0f} M" for number in (sum(self.cycles.values()), self.kernel_cycles)]
        cells = [*cycles, parts, format_bytes(self.temporary_bytes), f"{self.cpu_seconds:.0f}"]
        return f"| {' | '.join([*first, *cells])} |"


def compile_ours(case: Case, directory: Path) -> Program:
    """Compile the step of this package, with `hf-tpu plan`."""
    named = str(Path(__file__).with_name("trace_parts.py"))
    planned, _ = plan(case, directory, "--hlo", str(directory), program=[named])
    (program,) = planned["programs"]
    if program["error"] is not None:
        raise RuntimeError(f"The compiler refused {case}: {program['error'][:2000]}")
    (text,) = directory.glob("training_step_*.txt")
    return _make_program(text.read_text(encoding="utf-8"), program["memory"], program["cpu_seconds"], case)


def compile_jax(case: Case, directory: Path) -> Program:
    """Compile the step in JAX."""
    topology = find_topology(case.topology)
    model = make_model(case.model, directory, **case.sizes)
    options = {
        "config": json.loads((model / "config.json").read_text(encoding="utf-8")),
        "rows": int(case.settings["per_device_train_batch_size"]) * topology.num_chips,
        "length": case.length,
        "lora": "use_peft" in case.settings,
        "trained_dtype": case.settings.get("dtype", "float32"),
        "rematerialization": case.settings["rematerialization"],
        "block": BLOCK,
        "topology": topology.compiler_options,
    }
    (directory / "options.json").write_text(json.dumps(options), encoding="utf-8")
    script = Path(__file__).with_name("jax_step.py")
    subprocess.run([sys.executable, script, directory], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    if "error" in result:
        raise RuntimeError(f"The compiler refused {case}: {result['error'][:2000]}")
    text = (directory / "optimized.txt").read_text(encoding="utf-8")
    text = _name_kernels(text, case, options["config"])
    return _make_program(text, result["memory"], result["cpu_seconds"], case)


def _name_kernels(text: str, case: Case, config: dict) -> str:
    """Name the kernels of a program with their arithmetic: of the blocks of scores that a mask lets through."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rows = int(case.settings["per_device_train_batch_size"])

    def named(match: re.Match) -> str:
        window = config["sliding_window"] if match[1] == "sliding" else case.length
        scores = BLOCK**2 * sum(
            (last + 1 - max(0, last * BLOCK - window + 1) // BLOCK) for last in range(case.length // BLOCK)
        )
        flops = 2 * rows * config["num_attention_heads"] * scores * head_dim
        return f"{match[1]}{match[2]}attention_kernel[flops={PRODUCTS[match[3]] * flops}]/splash_mha_{match[3]}"

    return re.sub(r'(full|sliding)(_attention[^"]*/)splash_mha_(fwd|dkv|dq)', named, text)


def _make_program(text: str, memory: dict[str, int], cpu_seconds: float, case: Case) -> Program:
    chip = find_topology(case.topology).chip
    kernel_cycles = round(measure_cost(text).kernel_flops / chip.flops_per_second * chip.clock_hz)
    return Program(cycles_by_part(text), kernel_cycles, memory["temp"], cpu_seconds)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--only", metavar="WORDS", default="", help="compile only the runs whose row has these words")
    arguments = parser.parse_args()
    lines = [
        "| model | run | on | step | cycles | kernels besides, at the peak rate | millions of cycles by part | temporary memory | CPU seconds to compile |",
        "|---|---|---|---|---:|---:|---|---:|---:|",
    ]
    measured = []
    for case in CASES:
        run = [case.model, case.title, case.topology]
        if arguments.only not in " ".join(run):
            continue
        for step, compile_step in (("this package", compile_ours), ("JAX", compile_jax)):
            with tempfile.TemporaryDirectory() as directory:
                program = compile_step(case, Path(directory))
            measured.append({"run": run, "step": step, **vars(program)})
            lines.append(program.row(*run, step))
            print(lines[-1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in required_versions().items())
    lines += ["", f"{versions}; `python tests/benchmarks/tpu_beside_jax.py`"]
    block = keep_rows(CASES, "\n".join(lines), DOCUMENT, "tpu_beside_jax")
    publish(arguments, DOCUMENT, "tpu_beside_jax", block, measured)


if __name__ == "__main__":
    main()
