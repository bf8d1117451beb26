"""
Memory of a training step of torch_tpu on one v5e, with and without gradient checkpointing, by the compiler for TPU: a table.

    python tests/torch_tpu/step_memory.py [--write-docs]

28 layers of the widths of Qwen3-0.6B with LoRA, AdamW, bfloat16, 4 rows of 1,024 tokens. What is compiled is the program that torch_tpu
is given for the step, ahead of time, by the libtpu that it installs and jax, which knows that libtpu (`pip install jax==0.10.2`).
Nothing is run. Takes 12 GB of memory on the host.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

PAGE = Path(__file__).parents[2] / "docs" / "torch_tpu.md"
#: The program, and what is read of it.
PROGRAM, FACTS, MEMORY = "program.mlir", "facts.json", "result.json"
ROWS, LENGTH = 4, 1024


class _Captured(Exception):
    """The program of the step is there, and nothing is to be run."""


def capture(directory: Path, checkpointing: bool) -> None:
    """Write the program of a step to a directory, and which of its arguments results may take the place of."""
    import cpu_plugin

    cpu_plugin.start()

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch_tpu._internal.export import export
    from tpu_plans import make_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    def write(result_tensors, argument_tensors, donated_inputs, **others):
        text = export.tpu_torch_compile.serialize_mlir_text(
            export.tpu_torch_compile.build_mlir(result_tensors, argument_tensors), enable_debug_info=False
        )
        products = len(re.findall(r"stablehlo\.dot_general", text))
        if not products:
            # An operator before the step.
            return run(
                result_tensors=result_tensors,
                argument_tensors=argument_tensors,
                donated_inputs=donated_inputs,
                **others,
            )
        (directory / PROGRAM).write_text(text, encoding="utf-8")
        barriers = len(re.findall(r"stablehlo\.optimization_barrier", text))
        facts = {"donated": list(donated_inputs), "barriers": barriers, "products": products}
        (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        raise _Captured

    run = export.tpu_torch_compile.traverse_and_compile
    path = make_model("Qwen3-0.6B", directory)
    trainer = TPUSFTTrainer(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16),
        TPUSFTConfig(
            output_dir=str(directory / "run"),
            per_device_train_batch_size=ROWS,
            max_length=LENGTH,
            max_steps=1,
            bf16=True,
            gradient_checkpointing=checkpointing,
            report_to="none",
            save_strategy="no",
            run_report=False,
            compile_step="step",
        ),
        processing_class=AutoTokenizer.from_pretrained(path),
        train_dataset=Dataset.from_list([{"input_ids": [5] * LENGTH}] * ROWS),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"),
    )
    export.tpu_torch_compile.traverse_and_compile = write
    try:
        trainer.train()
    except _Captured:
        return
    raise RuntimeError("The step was not compiled as one program.")


def compile_ahead_of_time(directory: Path) -> None:
    """Compile the program of a directory for one v5e, and write what the compiler says of its memory."""
    from hf_tpu_ext.hardware.topologies import find_topology
    from hf_tpu_ext.plan.tpu_compiler import compile_program, mark_arguments, set_environment, write_compiled

    set_environment()
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        program = ir.Module.parse((directory / PROGRAM).read_text(encoding="utf-8"))
        donated = json.loads((directory / FACTS).read_text(encoding="utf-8"))["donated"]
        mark_arguments(program, donated, shardings={})
        write_compiled(lambda: compile_program(program, find_topology("v5e-1").compiler_options), directory)


def main() -> None:
    """Print the table, or write it."""
    from tables import make_parser, publish

    parser = make_parser(__doc__, PAGE)
    # The two parts of a row, each in a process of its own.
    parser.add_argument("--part", choices=["capture", "compile"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "capture":
        return capture(arguments.directory, arguments.checkpointing)
    if arguments.part == "compile":
        return compile_ahead_of_time(arguments.directory)
    lines = [
        "| `gradient_checkpointing` | temporaries | arguments | matrix products in the program | barriers |",
        "|---|---:|---:|---:|---:|",
    ]
    measured = []
    for checkpointing in (True, False):
        with tempfile.TemporaryDirectory() as directory:
            for part in ("capture", "compile"):
                command = [sys.executable, __file__, "--part", part, "--directory", directory]
                subprocess.run(
                    [*command, *(["--checkpointing"] if checkpointing else [])],
                    # torch_tpu and jax would each load libtpu.
                    env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0" if part == "compile" else "1"},
                    check=True,
                )
            found = [json.loads((Path(directory) / name).read_text(encoding="utf-8")) for name in (FACTS, MEMORY)]
        facts, result = found
        measured.append(facts | result)
        memory = {name: f"{size / 1e9:.2f} GB" for name, size in result["memory"].items()}
        lines.append(
            f"| `{str(checkpointing).lower()}` | {memory['temp']} | {memory['argument']} | {facts['products']:,} "
            f"| {facts['barriers']} |"
        )
    publish(arguments, PAGE, "step_memory", "\n".join(lines), measured)


if __name__ == "__main__":
    main()
