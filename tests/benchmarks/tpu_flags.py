"""
What flags of the compiler for TPU make of training steps: by its own estimate of cycles, by memory, and by how many collectives
start before they are needed.

    python tests/benchmarks/tpu_flags.py [--only WORDS]

Nothing is downloaded and nothing is run.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tpu_plans import LORA, Case, plan

from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.kernels.versions import required_versions
from hf_tpu_ext.plan.hlo import KINDS, parse_module
from hf_tpu_ext.plan.hlo_cost import count_runs


ONE_CHIP = Case("LoRA, 4 rows", "Qwen3-0.6B", settings=LORA | {"per_device_train_batch_size": "4"})
SHARDED = Case("LoRA, 4 rows a chip, mesh: fsdp", "Qwen2.5-7B", "v5e-8", settings=ONE_CHIP.settings | {"mesh": "fsdp"})
# Those that MaxText sets for a v5e (benchmarks/xla_flags_library.py), and others that decide on fusions and layouts.
ASYNC_COLLECTIVES = " ".join(
    f"--xla_tpu_{name}=true"
    for name in (
        "enable_async_collective_fusion",
        "enable_async_collective_fusion_fuse_all_gather",
        "enable_async_collective_fusion_multiple_steps",
        "overlap_compute_collective_tc",
    )
)
FLAGS = [
    (ONE_CHIP, ""),
    (ONE_CHIP, "--xla_tpu_scoped_vmem_limit_kib=65536"),
    (ONE_CHIP, "--xla_tpu_enable_experimental_fusion_cost_model=true"),
    (ONE_CHIP, "--xla_tpu_enable_large_2nd_minor_layout_for_x16=true"),
    (SHARDED, ""),
    (SHARDED, ASYNC_COLLECTIVES),
]


def count_collectives(text: str) -> tuple[int, int]:
    """How many collectives a program runs, and how many of them start before they are needed."""
    module = parse_module(text)
    runs, _ = count_runs(module)
    kinds = (*KINDS, *(f"{kind}-start" for kind in KINDS))
    found = [
        (times, line.opcode.endswith("-start"))
        for (computation, _), times in runs.items()
        for line in module.computations[computation].values()
        if line.opcode in kinds
    ]
    return sum(times for times, _ in found), sum(times for times, early in found if early)


def make_row(case: Case, flags: str) -> str:
    """Plan a run with flags, and write its row."""
    before = os.environ.get("LIBTPU_INIT_ARGS")
    os.environ["LIBTPU_INIT_ARGS"] = flags
    try:
        with tempfile.TemporaryDirectory() as name:
            planned, _ = plan(case, Path(name), "--hlo", name)
            text = next(Path(name).glob("training_step*.txt")).read_text(encoding="utf-8")
    finally:
        del os.environ["LIBTPU_INIT_ARGS"]
        if before is not None:
            os.environ["LIBTPU_INIT_ARGS"] = before
    program = planned["programs"][-1]
    count, early = count_collectives(text)
    cells = [
        *(case.model, case.title, case.topology),
        f"`{flags}`".replace("` `", "`") if flags else "none",
        f"{sum(program['cost']['cycles'].values()) / 1e6:.0f} M",
        format_bytes(planned["derived"]["parts"]["activations and temporaries"]),
        f"{early} of {count}" if count else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", default="", help="compile only the runs whose row has these words")
    arguments = parser.parse_args()
    lines = [
        "| model | run | on | flags | cycles | temporary memory | collectives that start early |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for case, flags in FLAGS:
        if arguments.only in f"{case.model} {case.title} {case.topology} {flags}":
            lines.append(make_row(case, flags))
            print(lines[-1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in required_versions().items())
    print("\n".join([*lines, "", versions]))


if __name__ == "__main__":
    main()
