"""
What the compiled training programs hold on each of eight chips, and what crosses between the chips.

    python tests/benchmarks/collectives.py

Trains one step with each scheme on eight devices of the host, and reads the programs that XLA dumps: the arguments of each
device, and the collectives in the program of a micro-step and in that of the closing step. Beside them stands what the
scheme needs.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from schemes import CHIPS, LENGTH, ROWS_PER_CHIP, SCHEMES, SIZES, Run, make_inputs, run_schemes
from tables import versions, write_block

from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.plan.hlo import Collective
from hf_tpu_ext.sharding.plan import PlannedParameter
from hf_tpu_ext.step.train_step import MICRO_STEP, OPTIMIZER_STEP


DOCUMENT = Path(__file__).parents[2] / "docs" / "eight_chips.md"
NOTES = f"""\
Counts are of operations in the program of one device. Bytes are those of whole tensors: what an all-gather makes, what
the others take. The program "{OPTIMIZER_STEP}" ends an optimizer step; with accumulation, the program "{MICRO_STEP}" runs
for every batch before the last.

- Data parallel needs one reduction of each trainable parameter per optimizer step, and none in a micro-step.
- Fully sharded needs, in every micro-step, each split weight of a layer gathered for the forward pass and again for the
  backward pass, the head once, since what is gathered of it is kept, and each gradient reduced. Gradient checkpointing
  gathers weights of a layer once more, for its second forward pass.
- The split embedding is neither gathered nor its gradient reduced: each device looks up the tokens of all devices among its
  own rows, an all-reduce puts together what they found, and the gradient of that is gathered (in the last column, the
  tensors in floating point). The partitioner gathers the weight instead if it is smaller than what is looked up.
- With both axes, the part of a gradient that a device of a group has is also reduced between the groups. That of the head
  is reduced whole, over all devices at once.
- There is no reduce-scatter in these programs: XLA's pipeline for the CPU has an all-reduce of the whole gradient, of
  which each device then takes its slice."""


@dataclass(frozen=True)
class Traffic:
    """
    Some collectives of a program.

    Args:
        count (`int`):
            Number of operations.
        num_bytes (`int`):
            Size of their tensors.
    """

    count: int
    num_bytes: int

    @classmethod
    def of(cls, items: Iterable[Collective | PlannedParameter]) -> "Traffic":
        """
        Add up.

        Args:
            items (`Iterable[Collective | PlannedParameter]`):
                Collectives, or parameters that each cross once.

        Returns:
            [`Traffic`]: The sum.
        """
        sizes = [item.num_bytes for item in items]
        return cls(len(sizes), sum(sizes))

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.num_bytes + other.num_bytes)

    def __str__(self) -> str:
        return f"{self.count} ({format_bytes(self.num_bytes)})" if self.count else "0"


def describe(item: Collective) -> str:
    """What is exchanged, e.g. `"pred[64,64]"`, `"8 x f32[512,32]"`."""
    counts = Counter(f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]" for tensor in item.tensors)
    return ", ".join(shape if count == 1 else f"{count} x {shape}" for shape, count in counts.items())


def needed_gathers(run: Run) -> Traffic:
    """
    What each program of a scheme must gather.

    Args:
        run ([`Run`]):
            What the scheme compiled.

    Returns:
        [`Traffic`]: Each split weight of a layer for both passes, and the head for the first.
    """
    layers = Traffic.of(parameter for parameter in run.split if _is_layer(parameter))
    return layers + Traffic.of(parameter for parameter in run.split if not _is_embedding(parameter))


def needed_reductions(run: Run, kind: str) -> Traffic:
    """
    What a program of a scheme must reduce, by all-reduce or reduce-scatter.

    Args:
        run ([`Run`]):
            What the scheme compiled.
        kind (`str`):
            [`MICRO_STEP`] or [`OPTIMIZER_STEP`].

    Returns:
        [`Traffic`]: Each gradient, and where the groups of a mesh hold the same parts, these parts.
    """
    if run.mesh["fsdp"] == 1:
        return Traffic.of(run.trainable if kind == OPTIMIZER_STEP else [])
    needed = Traffic.of(parameter for parameter in run.trainable if not _is_embedding(parameter))
    if run.mesh["data"] > 1:
        parts = [p for p in run.split if p.trainable and (_is_layer(p) or _is_embedding(p))]
        needed += Traffic(len(parts), sum(parameter.num_bytes // parameter.shards for parameter in parts))
    return needed


def _is_embedding(parameter: PlannedParameter) -> bool:
    return "embed" in parameter.name


def _is_layer(parameter: PlannedParameter) -> bool:
    return ".layers." in parameter.name


def make_table(runs: dict[str, Run]) -> str:
    """
    Show what was compiled.

    Args:
        runs (`dict[str, Run]`):
            See [`run_schemes`].

    Returns:
        `str`: Markdown table.
    """
    lines = [
        "| | program | arguments of a device | all-gather of weights | needed | reduce-scatter | all-reduce of gradients "
        "| reductions needed | all-reduce of single numbers | others |",
        "|---|---|" + "---:|" * 7 + "---|",
    ]
    for name, run in runs.items():
        for kind in sorted(run.dumps):
            program = run.program(kind)
            others = "; ".join(
                f"{item.kind} of {describe(item)} ({format_bytes(item.num_bytes)})" for item in program.others
            )
            cells = (
                SCHEMES[name].title,
                kind,
                format_bytes(program.argument_bytes),
                Traffic.of(program.gathers),
                needed_gathers(run),
                Traffic.of(program.scatters),
                Traffic.of(program.reductions),
                needed_reductions(run, kind),
                Traffic.of(program.numbers),
                others,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def describe_setup(runs: dict[str, Run]) -> str:
    """
    Say what was run, with what.

    Args:
        runs (`dict[str, Run]`):
            See [`run_schemes`].

    Returns:
        `str`: Markdown list.
    """
    weights = runs["data"].parameters
    return "\n".join(
        [
            f"- model: Qwen3, {', '.join(f'{name} {size}' for name, size in SIZES.items())}, float32 weights: {len(weights)} "
            f"tensors of {format_bytes(sum(weight.num_bytes for weight in weights))}, {len(runs['fsdp'].split)} of which "
            "fully sharded splits; AdamW",
            f"- batch: {ROWS_PER_CHIP} rows of {LENGTH} tokens on each of {CHIPS} devices of the host",
            f"- versions: {versions()}",
            "- command: `python tests/benchmarks/collectives.py`",
        ]
    )


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="replace the table in docs/eight_chips.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_inputs(Path(directory), **SIZES)
        runs = run_schemes(list(SCHEMES), Path(directory))
        block = "\n\n".join([make_table(runs), NOTES, describe_setup(runs)])
    print(block)
    if arguments.write_docs:
        write_block(DOCUMENT, "collectives", block)


if __name__ == "__main__":
    main()
