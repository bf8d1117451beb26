"""
Programs that a training step runs with torch_tpu, by what is compiled: a table.

    python tests/torch_tpu/launches.py [--write-docs]

Counted by the runtime's cache statistics, on the host by the PJRT plug-in for CPU.
"""

import sys
import tempfile
from pathlib import Path

import cpu_plugin


cpu_plugin.start()

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer  # noqa: E402
from hf_tpu_ext.examples.tiny import make_model  # noqa: E402


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tables import make_parser, publish  # noqa: E402


PAGE = Path(__file__).parents[2] / "docs" / "torch_tpu.md"


STEPS = 6


class _Count(TrainerCallback):
    # Not code of the user's, with which a step is not compiled whole.
    __module__ = "hf_tpu_ext.tests"

    def __init__(self, backend):
        self._backend, self.noted = backend, []

    def on_step_begin(self, args, state, control, **kwargs):
        self._backend.wait()
        self.noted.append(self._backend.counters())


def measure(directory: str, lora: bool, **config):
    """Programs that a step runs once all are compiled, those compiled in the first step, and in all later ones."""
    torch.tpu._clear_cache()
    torch.compiler.reset()
    rows = Dataset.from_list(
        [{"prompt": "abc" * (1 + row % 4), "completion": "cba" * (1 + row % 3)} for row in range(16)]
    )
    trainer = TPUSFTTrainer(
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        TPUSFTConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            max_steps=STEPS,
            logging_steps=100,
            bf16=False,
            max_length=32,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            run_report=False,
            **config,
        ),
        processing_class=AutoTokenizer.from_pretrained(directory),
        train_dataset=rows,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    count = _Count(trainer.backend)
    trainer.add_callback(count)
    trainer.train()
    first, *later = [after - before for before, after in zip(count.noted, count.noted[1:], strict=False)]
    return later[-1].executions, first.compiles, sum(step.compiles for step in later)


def main() -> None:
    """Print the table, or write it."""
    arguments = make_parser(__doc__, PAGE).parse_args()
    directory = str(make_model(Path(tempfile.mkdtemp()), hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    lines = ["| `compile_step` | weights | programs run a step | compiled in the first step | in all later ones |"]
    lines.append("|---|---|---|---|---|")
    for what in ("off", "layers", "step"):
        for lora in (False, True):
            runs, first, later = measure(directory, lora, compile_step=what)
            lines.append(f"| `{what}` | {'LoRA' if lora else 'full'} | {runs} | {first} | {later} |")
    publish(arguments, PAGE, "launches", "\n".join(lines), lines)


if __name__ == "__main__":
    main()
