"""
Trains one step, or traces it for a plan, and writes down the programs as text, and the memory that this took.

    python trace_driver.py train|trace MODEL OUTPUT '{"field": value, ...}'
"""

import json
import re
import sys
from pathlib import Path

from datasets import Dataset

from hf_tpu_ext.backends.host import peak_of_process
from hf_tpu_ext.backends.selection import select_tracing


#: Settings that are not fields of the config.
PARTS = {"chips": 1, "lora": None, "quantized": None}

how, model, output, given = sys.argv[1:]
settings = json.loads(given)
chips, lora, quantized = (settings.pop(name, default) for name, default in PARTS.items())
if how == "trace":
    # With the operators of the host's programs: of the kernels of a TPU, it has none.
    select_tracing(chips).kernels.platform = "cpu"

import torch_xla  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import BitsAndBytesConfig  # noqa: E402

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer  # noqa: E402
from hf_tpu_ext.backends.xla import programs as xla_programs  # noqa: E402
from hf_tpu_ext.plan.trace import trace_run  # noqa: E402


def of_files():
    """Memory of this process with pages of files, as libraries: a machine that is short of memory drops them, and reads them again."""
    return int(re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


texts, donated, before, of_files_before = [], [], peak_of_process(), of_files()


def note(results, updated):
    text = torch_xla._XLAC._get_xla_tensors_hlo(results)
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    # Numbered by whatever was traced before in this process.
    texts.append(re.sub(r"^HloModule IrToHlo\.\d+", "HloModule", text))
    donated.append([index for index, is_updated in enumerate(updated) if is_updated])


def train(adapt=lambda trainer: trainer):
    rows = Dataset.from_list([{"input_ids": [1] * length} for length in (40, 64)] * 64)
    trainer = adapt(TPUSFTTrainer)(
        model=model,
        args=TPUSFTConfig(
            **{"output_dir": f"{output}.run", "max_length": 64, "per_device_train_batch_size": 2, "max_steps": 1}
            | {
                "model_init_kwargs": {"dtype": "float32"},
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
            }
            | settings
        ),
        train_dataset=rows,
        peft_config=None if lora is None else LoraConfig(task_type="CAUSAL_LM", **lora),
        quantization_config=None if quantized is None else BitsAndBytesConfig(**quantized),
    )
    trainer.train()


if how == "train":
    hash_traced = xla_programs.XLAPrograms.hash_traced

    def note_and_hash(programs, traced):
        note(traced.results, traced.is_donated)
        return hash_traced(programs, traced)

    xla_programs.XLAPrograms.hash_traced = note_and_hash
    train()
    beside = [{}] * len(texts)
else:
    write_module = torch_xla._XLAC._get_xla_tensors_hlo_proto

    def note_and_write(results):
        note(results, [])
        return write_module(results)

    torch_xla._XLAC._get_xla_tensors_hlo_proto = note_and_write
    programs, _ = trace_run(train)
    donated = [
        [index for index, argument in enumerate(program.arguments) if argument.is_donated] for program in programs
    ]
    # A tensor without a value cannot be marked as split. It is noted beside the module.
    beside = [
        {str(index): argument.sharding for index, argument in enumerate(program.arguments) if argument.sharding}
        for program in programs
    ]


def take_out_shardings(text, beside):
    """The text without the shardings of arguments, and these."""
    shardings = {**dict(re.findall(r"parameter\((\d+)\), sharding=(\{.*?\})$", text, re.MULTILINE)), **beside}

    def without_repeated(match):
        return match[1] if shardings.get(match[2]) == match[3] else match[0]

    text = re.sub(r"(parameter\(\d+\)), sharding=\{.*?\}$", r"\1", text, flags=re.MULTILINE)
    # Where an argument that is marked is cast, torch_xla says the same of the result.
    text = re.sub(r"( convert\([^)]*%p(\d+)\.\d+\)), sharding=(\{.*?\})$", without_repeated, text, flags=re.MULTILINE)
    # Without a sharding, an argument is whole on every chip.
    return text, {index: sharding for index, sharding in shardings.items() if sharding != "{replicated}"}


taken = [take_out_shardings(text, noted) for text, noted in zip(texts, beside, strict=True)]
num_bytes = peak_of_process() - before - max(0, of_files() - of_files_before)
Path(output).write_text(json.dumps({"programs": taken, "donated": donated, "bytes": num_bytes}))
