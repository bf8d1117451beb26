"""
What the compiled training programs hold on each of eight chips, and what crosses between the chips.

    python tests/benchmarks/collectives.py

Trains one step with each scheme on eight devices of the host, each scheme in a process of its own, and reads the programs
that XLA dumps: the arguments of each device, and the collectives in the program of a micro-step and in that of the closing
step. Beside them stands what the scheme needs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from datasets import load_dataset
from hlo import Collective, Program
from peft import LoraConfig

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model
from hf_tpu_ext.sharding.plan import PlannedParameter, format_bytes


CHIPS = 8
ROWS_PER_CHIP, LENGTH = 8, 64
# Matrices of a few hundred kB: weights dominate the arguments. A batch of all chips has more tokens than any of them has
# rows, as with models and batches of usual sizes. Otherwise activations are smaller than weights, and the partitioner
# exchanges those instead.
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
MICRO_STEP, CLOSING_STEP = "micro-step", "training step"
BEFORE, AFTER = ".before_optimizations.txt", ".cpu_after_optimizations.txt"
DOCUMENT = Path(__file__).parents[2] / "docs" / "eight_chips.md"
START, END = "<!-- collectives:start -->", "<!-- collectives:end -->"
NOTES = f"""\
Counts are of operations in the program of one device. Bytes are those of whole tensors: what an all-gather makes, what
the others take. The program "{CLOSING_STEP}" ends an optimizer step; with accumulation, the program "{MICRO_STEP}" runs
for every batch before the last.

- Data parallel needs one reduction of each trainable parameter per optimizer step, and none in a micro-step.
- Fully sharded needs each split weight gathered for the forward pass and again for the backward pass, and each gradient
  reduced, both in every micro-step. Gradient checkpointing, which is off here, gathers the weights of a layer once more
  for its second forward pass.
- With both axes, what is left of a gradient on each device of a group is also reduced between the groups.
- There is no reduce-scatter in these programs: XLA's pipeline for the CPU has an all-reduce of the whole gradient, of
  which each device then takes its slice.
- The gradient of a split embedding is not reduced on the fully sharded mesh: the gradients of its outputs are exchanged
  by an all-to-all, and each device adds up its columns. With both axes it is reduced whole, once over all devices."""


@dataclass(frozen=True)
class Scheme:
    """
    One way to spread a run over the chips.

    Args:
        title (`str`):
            Name for people.
        mesh (`str`):
            As in [`TPUSFTConfig`].
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-steps of an optimizer step.
        lora (`bool`, *optional*, defaults to `False`):
            Whether adapters are trained instead of the weights.
    """

    title: str
    mesh: str
    gradient_accumulation_steps: int = 1
    lora: bool = False


SCHEMES = {
    "data": Scheme("data parallel", "data"),
    "data_accumulated": Scheme("data parallel, 4 accumulated", "data", 4),
    "data_accumulated_lora": Scheme("data parallel, 4 accumulated, LoRA", "data", 4, lora=True),
    "fsdp": Scheme("fully sharded", "fsdp"),
    "fsdp_accumulated": Scheme("fully sharded, 4 accumulated", "fsdp", 4),
    "data_fsdp": Scheme("data=2 x fsdp=4", "data=2,fsdp=4"),
}


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


@dataclass(frozen=True)
class Run:
    """
    What one scheme compiled.

    Args:
        mesh (`dict[str, int]`):
            Size of each axis.
        parameters (`list[PlannedParameter]`):
            The model's parameters and where they are.
        dumps (`dict[str, Path]`):
            Dumped HLO before optimizations, by what the program does ([`MICRO_STEP`], [`CLOSING_STEP`]).
    """

    mesh: dict[str, int]
    parameters: list[PlannedParameter]
    dumps: dict[str, Path]

    @property
    def trainable(self) -> list[PlannedParameter]:
        """Parameters that have a gradient."""
        return [parameter for parameter in self.parameters if parameter.trainable]

    @property
    def split(self) -> list[PlannedParameter]:
        """Parameters of which each chip holds a part."""
        return [parameter for parameter in self.parameters if parameter.shards > 1]

    def program(self, kind: str) -> Program:
        """
        Read a compiled program.

        Args:
            kind (`str`):
                [`MICRO_STEP`] or [`CLOSING_STEP`].

        Returns:
            [`Program`]: The program of one device.
        """
        dump = self.dumps[kind]
        return Program(dump.with_name(dump.name.replace(BEFORE, AFTER)).read_text(encoding="utf-8"))

    def needed_gathers(self) -> Traffic:
        """
        What a program of the scheme must gather.

        Returns:
            [`Traffic`]: Each split weight for the forward pass, and again for the backward pass.
        """
        return Traffic.of(self.split) + Traffic.of(self.split)

    def needed_reductions(self, kind: str) -> Traffic:
        """
        What a program of the scheme must reduce, by all-reduce or reduce-scatter.

        Args:
            kind (`str`):
                [`MICRO_STEP`] or [`CLOSING_STEP`].

        Returns:
            [`Traffic`]: Each gradient, and where the groups of a mesh hold the same parts, these parts.
        """
        if self.mesh["fsdp"] == 1:
            return Traffic.of(self.trainable if kind == CLOSING_STEP else [])
        between_groups = [parameter for parameter in self.split if parameter.trainable and self.mesh["data"] > 1]
        parts = sum(parameter.num_bytes // parameter.shards for parameter in between_groups)
        return Traffic.of(self.trainable) + Traffic(len(between_groups), parts)


def make_inputs(directory: Path, **sizes) -> None:
    """
    Make the model and the rows that all schemes train.

    Args:
        directory (`Path`):
            Where to write them.
        **sizes:
            Fields of the model's configuration.
    """
    make_model(directory / "model", **sizes)
    make_arithmetic(directory / "data")


def train(scheme: Scheme, directory: Path, dump: Path) -> Run:
    """
    Train one step in this process, which has the devices and dumps its programs.

    Args:
        scheme ([`Scheme`]):
            How.
        directory (`Path`):
            Directory of [`make_inputs`].
        dump (`Path`):
            Where XLA dumps programs.

    Returns:
        [`Run`]: What was compiled.
    """
    dumps: dict[str, Path] = {}

    class Recorder(TPUSFTTrainer):
        # XLA dumps a program while it compiles it, and a program of the step is compiled where it ends. So the file that
        # appears in between is that program, whatever else was compiled before (placing the model, reading a log).
        def end_program(self, kind: str, where: str) -> None:
            before = set(dump.glob(f"*{BEFORE}"))
            super().end_program(kind, where)
            new = set(dump.glob(f"*{BEFORE}")) - before
            if new:
                assert kind not in dumps
                (dumps[kind],) = new

    trainer = Recorder(
        str(directory / "model"),
        TPUSFTConfig(
            str(dump / "output"),
            mesh=scheme.mesh,
            gradient_accumulation_steps=scheme.gradient_accumulation_steps,
            per_device_train_batch_size=ROWS_PER_CHIP,
            max_length=LENGTH,
            max_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=str(directory / "data" / "train.jsonl"), split="train"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0) if scheme.lora else None,
    )
    trainer.train()
    return Run(trainer.mesh, trainer.sharding_plan.parameters, dumps)


def run_scheme(name: str, directory: Path) -> Run:
    """
    Train one step in a process of its own.

    Args:
        name (`str`):
            One of [`SCHEMES`].
        directory (`Path`):
            Directory of [`make_inputs`]. The dumps are put into it, too.

    Returns:
        [`Run`]: What was compiled.

    Raises:
        `RuntimeError`: The process failed. Its output is in the message.
    """
    dump = directory / name
    command = [sys.executable, __file__, "train", name, "--directory", directory]
    settings = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(CHIPS),
        "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"The scheme {name} failed:\n{done.stdout}")
    saved = json.loads((dump / "run.json").read_text(encoding="utf-8"))
    return Run(
        saved["mesh"],
        [PlannedParameter(**parameter) for parameter in saved["parameters"]],
        {kind: Path(path) for kind, path in saved["dumps"].items()},
    )


def make_table(runs: dict[str, Run]) -> str:
    """
    Show what was compiled.

    Args:
        runs (`dict[str, Run]`):
            See [`run_scheme`], by scheme.

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
                f"{item.kind} of {item.describe()} ({format_bytes(item.num_bytes)})" for item in program.others
            )
            cells = (
                SCHEMES[name].title,
                kind,
                format_bytes(program.argument_bytes),
                Traffic.of(program.gathers),
                run.needed_gathers(),
                Traffic.of(program.scatters),
                Traffic.of(program.reductions),
                run.needed_reductions(kind),
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
            See [`run_scheme`], by scheme.

    Returns:
        `str`: Markdown list.
    """
    weights = runs["data"].parameters
    return "\n".join(
        [
            f"- model: Qwen3, {', '.join(f'{name} {size}' for name, size in SIZES.items())}, float32: {len(weights)} "
            f"tensors of {format_bytes(sum(weight.num_bytes for weight in weights))}, {len(runs['fsdp'].split)} of which "
            "fully sharded splits; AdamW",
            f"- batch: {ROWS_PER_CHIP} rows of {LENGTH} tokens on each of {CHIPS} devices of the host",
            f"- versions: {', '.join(f'{name} {version(name)}' for name in ('torch', 'torch_xla', 'transformers', 'trl'))}",
            "- command: `python tests/benchmarks/collectives.py`",
        ]
    )


def write_docs(block: str) -> None:
    """
    Replace what stands between the two markers of the document.

    Args:
        block (`str`):
            Markdown.

    Raises:
        `ValueError`: The markers are not there.
    """
    before, start, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{DOCUMENT.name} has no place for the table. Put these two lines into it: {START} and {END}")
    temporary = DOCUMENT.with_suffix(".tmp")
    temporary.write_text(f"{before}{START}\n{block}\n{END}{after}", encoding="utf-8")
    os.replace(temporary, DOCUMENT)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parse the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; by default those of the process.

    Returns:
        `argparse.Namespace`: The arguments.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="replace the table in docs/eight_chips.md")
    commands = parser.add_subparsers(dest="command")
    trains = commands.add_parser("train", help="train one step with one scheme, in this process")
    trains.add_argument("scheme", choices=SCHEMES)
    trains.add_argument("--directory", type=Path, required=True, help="where the model, the rows and the dumps are")
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark and print its table, or train with one scheme."""
    arguments = parse_arguments()
    if arguments.command == "train":
        dump = arguments.directory / arguments.scheme
        run = train(SCHEMES[arguments.scheme], arguments.directory, dump)
        (dump / "run.json").write_text(json.dumps(asdict(run), default=str), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as directory:
        make_inputs(Path(directory), **SIZES)
        runs = {}
        for name, scheme in SCHEMES.items():
            print(f"{scheme.title}: compiling", file=sys.stderr)
            runs[name] = run_scheme(name, Path(directory))
        block = "\n\n".join([make_table(runs), NOTES, describe_setup(runs)])
    print(block)
    if arguments.write_docs:
        write_docs(block)


if __name__ == "__main__":
    main()
