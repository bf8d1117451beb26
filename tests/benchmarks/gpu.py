"""
What a step takes on a GPU, beside stock TRL: time and peak memory.

    python tests/benchmarks/gpu.py --write-docs

A model of Qwen3-0.6B's sizes with random weights trains on random rows, by stock TRL and by this package, in runs that take turns; and
with a teacher, online and cached, which stock TRL has not, beside plain fine-tuning. Times are medians over runs of the seconds from
the third step to the last. The command fails where losses of stock TRL and of this package differ by more than 1 %.
"""

import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tables import make_parser, publish
from tpu_plans import QWEN3
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.cli.main import main as hf_tpu
from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.examples.tiny import make_tokenizer


DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BATCH_SIZE, LENGTH, TOP_K = 4, 1024, 64
WARM_STEPS = 2
LOSSES = 1e-2
#: What of stock TRL's settings each kind of training changes.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"lora": True},
    "LoRA, no activation checkpointing": {"lora": True, "gradient_checkpointing": False},
}
TAUGHT: dict[str, dict[str, Any]] = {
    "LoRA, teacher of the same size, all logits": {"lora": True, "kd_teacher": "base"},
    "LoRA, cached teacher, top 64": {"lora": True, "kd_cache": "cache"},
}


class Times(TrainerCallback):
    """Seconds from the end of one step to the end of another."""

    def __init__(self, last: int):
        self._last = last
        self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (WARM_STEPS, self._last):
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.seconds


def prepare(directory: Path, steps: int) -> None:
    """Write a model, rows, and the cache of a teacher."""
    make_tokenizer(directory / "model")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **QWEN3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "model")
    # Words of one token each.
    letters = torch.randint(97, 123, (BATCH_SIZE * steps, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = [{"text": "".join(map(chr, row))} for row in letters.tolist()]
    write_splits(directory / "data", {"train": rows, "test": rows[:1]})
    status = hf_tpu(
        [
            "cache-teacher",
            f"--model_name_or_path={directory / 'model'}",
            f"--kd_teacher={directory / 'model'}",
            f"--dataset_name={directory / 'data'}",
            f"--kd_cache={directory / 'cache'}",
            f"--kd_top_k={TOP_K}",
            f"--max_length={LENGTH}",
        ]
    )
    assert status == 0


def train(directory: Path, steps: int, ours: bool, lora: bool = False, **settings: Any) -> dict[str, Any]:
    """Train once: seconds of a step, bytes at peak and losses."""
    trainer_cls, config_cls = (TPUSFTTrainer, TPUSFTConfig) if ours else (trl.SFTTrainer, trl.SFTConfig)
    if settings.get("kd_cache"):
        settings["kd_cache"] = str(directory / "cache")
    lines = (directory / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    times = Times(steps)
    trainer = trainer_cls(
        AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32),
        config_cls(
            output_dir=str(directory / "runs"),
            max_length=LENGTH,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=steps,
            logging_steps=steps,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        callbacks=[times],
    )
    trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    measured = {
        "seconds": times.seconds / (steps - WARM_STEPS),
        "bytes": torch.cuda.max_memory_allocated(),
        "loss": loss,
    }
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return measured


def make_table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Show a step's time and memory, and the ratio to stock TRL of runs that took turns."""
    lines = ["| | seconds a step | of stock TRL | GiB at peak | of stock TRL |", "|---|---:|---:|---:|---:|"]
    for kind, by_trainer in results.items():
        mine, stock = by_trainer["this package"], by_trainer.get("stock TRL")
        cells = []
        for measured, digits, unit in (("seconds", 3, 1), ("bytes", 1, 2**30)):
            cells.append(f"{statistics.median(run[measured] for run in mine) / unit:.{digits}f}")
            ratios = [run[measured] / other[measured] for run, other in zip(mine, stock or (), strict=False)]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "–")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its table."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each trainer (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run (default: 12)")
    arguments = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory, arguments.steps)
        for _ in range(arguments.repeats):
            for kind, settings in KINDS.items():
                for trainer in ("stock TRL", "this package"):
                    runs = results.setdefault(kind, {}).setdefault(trainer, [])
                    runs.append(train(directory, arguments.steps, trainer == "this package", **settings))
            for kind, settings in TAUGHT.items():
                runs = results.setdefault(kind, {}).setdefault("this package", [])
                runs.append(train(directory, arguments.steps, True, **settings))
    setup = [
        f"Qwen3-0.6B's sizes, random weights, bfloat16 compute with float32 weights, {BATCH_SIZE} x {LENGTH} tokens a step",
        f"medians over {arguments.repeats} runs of {arguments.steps} steps, which take turns",
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"trl {trl.__version__}",
        f"command: `python tests/benchmarks/gpu.py --repeats {arguments.repeats} --steps {arguments.steps}`",
    ]
    publish(
        arguments, DOCUMENT, "gpu", "\n".join([make_table(results), "", *(f"- {line}" for line in setup)]), results
    )
    for kind, by_trainer in results.items():
        for mine, stock in zip(by_trainer["this package"], by_trainer.get("stock TRL", ()), strict=False):
            if not abs(mine["loss"] - stock["loss"]) <= LOSSES * stock["loss"]:
                raise SystemExit(f"{kind}: the loss is {mine['loss']}, and {stock['loss']} of stock TRL.")


if __name__ == "__main__":
    main()
