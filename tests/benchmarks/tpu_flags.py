"""
What flags of the compiler for TPU make of training steps: by its own estimate of cycles, by memory, and by how much of the
collectives goes on while the chip computes.

    python tests/benchmarks/tpu_flags.py [--only WORDS] [--write-docs]

Nothing is downloaded and nothing is run.
"""

import os
import sys
import tempfile
from pathlib import Path

from tables import make_parser, publish
from tpu_plans import DOCUMENT, LORA, Case, plan

from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.kernels.versions import required_versions


ROWS = {"per_device_train_batch_size": "4", "eval_strategy": "no"}
ONE_CHIP = Case("LoRA, 4 rows", "Qwen3-0.6B", settings=LORA | ROWS)
SHARDED = Case("LoRA, 4 rows a chip, mesh: fsdp", "Qwen2.5-7B", "v5e-8", settings=LORA | ROWS | {"mesh": "fsdp"})
FULL = Case("full, 4 rows a chip, mesh: fsdp", "Qwen2.5-0.5B", "v5e-8", settings=ROWS | {"mesh": "fsdp"})
REPLICATED = Case("full, 4 rows a chip, mesh: data", "Qwen2.5-0.5B", "v5e-8", settings=ROWS | {"mesh": "data"})
# Those that MaxText sets for a v5e (benchmarks/xla_flags_library.py), and their opposite.
_FUSION = "xla_tpu_enable_async_collective_fusion"
SETS = {
    "collectives fused with arithmetic": (
        _FUSION,
        f"{_FUSION}_fuse_all_gather",
        f"{_FUSION}_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_gather",
    ),
    "no collectives fused with arithmetic": (f"{_FUSION}=false",),
    "all-reduces of data parallelism": (
        _FUSION,
        f"{_FUSION}_fuse_all_reduce",
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_data_parallel_opt_different_sized_ops",
    ),
    "layout for reduce-scatter": (
        "xla_tpu_use_minor_sharding_for_major_trivial_input",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
        "xla_tpu_assign_all_reduce_scatter_layout",
    ),
    "scoped VMEM of 64 MB": ("xla_tpu_scoped_vmem_limit_kib=65536",),
}
_FUSED, _NOT_FUSED, _OF_DATA, _OF_SCATTER, _VMEM = SETS
TRIED = [
    (SHARDED, (_FUSED, _NOT_FUSED)),
    (REPLICATED, (_OF_DATA,)),
    (FULL, (_OF_SCATTER,)),
    (ONE_CHIP, (_VMEM,)),
]


def make_row(case: Case, name: str) -> str:
    """Plan a run with a set of flags, by default none, and write its row."""
    before = os.environ.get("LIBTPU_INIT_ARGS")
    flags = (flag if "=" in flag else f"{flag}=true" for flag in SETS.get(name, ()))
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--{flag}" for flag in flags)
    try:
        with tempfile.TemporaryDirectory() as directory:
            planned, _ = plan(case, Path(directory))
    finally:
        del os.environ["LIBTPU_INIT_ARGS"]
        if before is not None:
            os.environ["LIBTPU_INIT_ARGS"] = before
    (program,) = planned["programs"]
    exchanges = program["cost"]["exchanges"]
    sent, beside = (sum(item[key] for item in exchanges) for key in ("num_bytes", "overlapped_bytes"))
    cells = [
        *(case.model, case.title, case.topology, name),
        f"{sum(program['cost']['cycles'].values()) / 1e6:.0f} M",
        format_bytes(planned["derived"]["parts"]["activations and temporaries"]),
        f"{format_bytes(beside)} of {format_bytes(sent)}" if sent else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the benchmark and print its table."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--only", metavar="WORDS", default="", help="compile only the runs whose row has these words")
    arguments = parser.parse_args()
    lines = [
        "| model | run | on | flags | cycles | temporary memory | collectives beside arithmetic |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for case, names in TRIED:
        for name in ("none", *names):
            if arguments.only in f"{case.model} {case.title} {case.topology} {name}":
                lines.append(make_row(case, name))
                print(lines[-1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in required_versions().items())
    only = f' --only "{arguments.only}"' if arguments.only else ""
    block = "\n".join([*lines, "", f"{versions}; `python tests/benchmarks/tpu_flags.py{only}`"])
    publish(arguments, DOCUMENT, "tpu_flags", block, lines[2:])


if __name__ == "__main__":
    main()
