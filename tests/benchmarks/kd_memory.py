"""
What distillation from a cached teacher costs: memory of the compiled step, and its time.

    python tests/benchmarks/kd_memory.py --write-docs

Memory is that of the temporary buffers in XLA's buffer assignment of the whole training step, with LoRA and in full: this
package's, and the same step with the loss written out, with the logits of the whole batch and autograd. Times are those of
steps of `TPUSFTTrainer` on one model and the same rows, with a cached teacher and without one, in windows that take turns. All
on XLA compiled for the host. The command fails where distillation takes more than 1.25 of the time of the plain step or, at a
vocabulary of 32,768, more than a quarter of the written-out memory.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from damage import DOCUMENT
from datasets import load_dataset
from peft import LoraConfig
from tables import make_parser, publish, versions
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.cli.main import main as hf_tpu
from hf_tpu_ext.distillation.losses import top_k_divergence
from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.attention import static_masks


VOCABULARIES = (8192, 16384, 32768, 65536)
BATCH_SIZE, TOP_K = 2, 128
#: Of the step whose memory is measured: little besides the loss.
MEMORY_LENGTH = 1024
MEMORY_SIZES = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
#: Of the step that is timed: a head with about a fifth of the weights, as in a small language model.
TIME_LENGTH = 256
TIME_SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8192}
MOST_MEMORY, MOST_TIME = 0.25, 1.25


class WrittenOut(TPUSFTTrainer):
    """Distillation with the logits of the whole batch, as guides write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        teacher = self.teacher(model, inputs)
        labels = inputs["labels"][:, 1:].flatten()
        with static_masks(None):
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        logits = logits[:, :-1].flatten(0, 1)
        ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        kd = top_k_divergence(teacher, logits, 1.0, "forward_kl")
        return torch.where(labels != -100, 0.5 * ce + 0.5 * kd, torch.zeros_like(ce)).sum() / num_items_in_batch


TRAINERS = {"this package": TPUSFTTrainer, "written out": WrittenOut}


def prepare(directory: Path, length: int, rows: int, **sizes) -> None:
    """Make a model, data, and the cache of a teacher."""
    make_model(directory / "model", **sizes)
    make_model(directory / "teacher", seed=1, **sizes)
    texts = [{"text": f"{number} " * length} for number in range(rows)]
    write_splits(directory / "data", {"train": texts, "test": texts[:1]})
    hf_tpu(
        [
            "cache-teacher",
            f"--model_name_or_path={directory / 'model'}",
            f"--kd_teacher={directory / 'teacher'}",
            f"--dataset_name={directory / 'data'}",
            f"--kd_cache={directory / 'cache'}",
            f"--kd_top_k={TOP_K}",
            f"--max_length={length}",
            "--batch_size=1",
            "--bf16=False",
            "--backend=xla",
        ]
    )


def make_trainer(directory: Path, length: int, steps: int, name: str, cached: bool, lora: bool) -> TPUSFTTrainer:
    """Make a trainer of what [`prepare`] made."""
    return TRAINERS[name](
        AutoModelForCausalLM.from_pretrained(directory / "model"),
        TPUSFTConfig(
            output_dir=str(directory / "runs"),
            backend="xla",
            max_length=length,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=steps,
            logging_steps=steps,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            kd_cache=str(directory / "cache") if cached else None,
        ),
        train_dataset=load_dataset("json", data_dir=str(directory / "data"))["train"],
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )


def temp_bytes(report: str) -> int:
    """Read the size of a program's temporary buffers."""
    return sum(
        int(size) for size in re.findall(r"^allocation \d+: size (\d+), preallocated-temp", report, re.MULTILINE)
    )


def train_one_step(directory: Path, name: str, lora: bool) -> None:
    """Compile a step and run it once."""
    make_trainer(directory, MEMORY_LENGTH, 1, name, cached=True, lora=lora).train()


def run_apart(function: Callable[..., None], dump: Path, *args, **kwargs) -> None:
    """
    Call a function in a process of its own, where XLA writes reports. It reads its flags once, when it is loaded.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=args, kwargs=kwargs)
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump}"
    process.start()
    del os.environ["XLA_FLAGS"]
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}{args} failed.")


def measure_memory(vocab_size: int) -> dict[str, int]:
    """Measure the memory of all steps at a vocabulary."""
    found = {}
    with TemporaryDirectory() as name:
        directory = Path(name)
        run_apart(
            prepare, directory / "dump", directory, MEMORY_LENGTH, BATCH_SIZE, vocab_size=vocab_size, **MEMORY_SIZES
        )
        for form, lora in (("LoRA", True), ("full fine-tuning", False)):
            for trainer in TRAINERS:
                dump = directory / f"dump{len(found)}"
                run_apart(train_one_step, dump, directory, trainer, lora)
                reports = (path.read_text(encoding="utf-8") for path in dump.glob("*buffer-assignment.txt"))
                found[f"{form}: {trainer}"] = max(map(temp_bytes, reports))
    return found


class Timer(TrainerCallback):
    """
    Seconds per step of a training without its first step, on the clock and of the processors.

    Args:
        trainer ([`TPUSFTTrainer`]):
            What is timed.
    """

    def __init__(self, trainer: TPUSFTTrainer):
        self.trainer = trainer
        self.windows: list[tuple[float, float]] = []

    def _now(self) -> tuple[float, float]:
        # Programs run behind the loop.
        self.trainer.backend.wait()
        return time.perf_counter(), time.process_time()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._start = self._now()

    def on_train_end(self, args, state, control, **kwargs):
        steps = state.global_step - 1
        self.windows.append(tuple((now - start) / steps for start, now in zip(self._start, self._now(), strict=True)))


def measure_time(windows: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Time steps with a cached teacher and without one, in turns."""
    with TemporaryDirectory() as directory:
        prepare(Path(directory), TIME_LENGTH, 64, **TIME_SIZES)
        timers = {}
        for name, cached in {"plain": False, "cached": True}.items():
            trainer = make_trainer(Path(directory), TIME_LENGTH, steps + 1, "this package", cached, lora=False)
            timers[name] = Timer(trainer)
            trainer.add_callback(timers[name])
        for _ in range(windows + 1):
            for timer in timers.values():
                timer.trainer.train()
    return {name: timer.windows[1:] for name, timer in timers.items()}


def ratios(seconds: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    """Compare steps with a teacher to those without one."""
    rounds = list(zip(seconds["cached"], seconds["plain"], strict=True))
    return tuple(statistics.median(own[clock] / other[clock] for own, other in rounds) for clock in range(2))


def make_tables(memory: dict[int, dict[str, int]], seconds: dict[str, list[tuple[float, float]]]) -> str:
    """Show the results."""
    lines = [
        "| Temporary memory of a step, vocabulary | " + " | ".join(f"{size:,}" for size in memory) + " |",
        "|---|" + "---:|" * len(memory),
    ]
    for form in ("LoRA", "full fine-tuning"):
        own, other = ([by_row[f"{form}: {name}"] for by_row in memory.values()] for name in TRAINERS)
        for name, sizes in zip(TRAINERS, (own, other), strict=True):
            lines.append(f"| {form}: {name} | {' | '.join(f'{size / 2**20:.0f} MiB' for size in sizes)} |")
        shares = (f"{mine / theirs:.3f}" for mine, theirs in zip(own, other, strict=True))
        lines.append(f"| {form}: ratio | {' | '.join(shares)} |")
    lines += ["", "| Time of a step | seconds | CPU seconds |", "|---|---:|---:|"]
    for name, title in {"plain": "without a teacher", "cached": "with a cached teacher"}.items():
        cells = " | ".join(f"{statistics.median(values):.3f}" for values in zip(*seconds[name], strict=True))
        lines.append(f"| {title} | {cells} |")
    lines.append(f"| ratio | {' | '.join(f'{ratio:.2f}' for ratio in ratios(seconds))} |")
    return "\n".join(lines)


def describe(arguments: argparse.Namespace) -> str:
    """Say what was run."""
    return "\n".join(
        [
            f"- memory: {BATCH_SIZE} x {MEMORY_LENGTH} tokens, one layer, hidden size {MEMORY_SIZES['hidden_size']}, float32, "
            f"K={TOP_K}; that of full fine-tuning holds the gradients, of the head too",
            f"- time: full fine-tuning, {BATCH_SIZE} x {TIME_LENGTH} tokens, {TIME_SIZES['num_hidden_layers']} layers, hidden "
            f"size {TIME_SIZES['hidden_size']}, vocabulary {TIME_SIZES['vocab_size']:,}; medians over {arguments.windows} "
            f"windows of {arguments.steps} steps, ratios within a round; XLA on CPU, {os.cpu_count()} cores",
            f"- versions: {versions()}",
            "- command: `python tests/benchmarks/kd_memory.py`",
        ]
    )


def check(memory: dict[int, dict[str, int]], seconds: dict[str, list[tuple[float, float]]]) -> None:
    """Hold the results to what the documentation promises."""
    share = memory[32768]["LoRA: this package"] / memory[32768]["LoRA: written out"]
    if share > MOST_MEMORY:
        raise SystemExit(f"The step takes {share:.3f} of the written-out memory (at most {MOST_MEMORY}).")
    ratio, _ = ratios(seconds)
    if ratio > MOST_TIME:
        raise SystemExit(f"A step takes {ratio:.2f} of the time of the plain one (at most {MOST_TIME}).")


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--windows", type=int, default=11, help="timed windows (default: 11)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a window (default: 8)")
    arguments = parser.parse_args()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    memory = {}
    for vocab_size in VOCABULARIES:
        memory[vocab_size] = measure_memory(vocab_size)
        print(vocab_size, json.dumps(memory[vocab_size]), flush=True)
    seconds = measure_time(arguments.windows, arguments.steps)
    block = f"{make_tables(memory, seconds)}\n\n{describe(arguments)}"
    publish(arguments, DOCUMENT, "kd_memory", block, {"memory": memory, "seconds": seconds})
    check(memory, seconds)


if __name__ == "__main__":
    main()
