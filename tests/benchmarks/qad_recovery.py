"""
How much of what rounding to 4, 3 and 2 bits took from a model is brought back, from the same tokens: by a LoRA beside the
rounded weights, and by quantization-aware training with labels and with a cached teacher, of all weights and of adapters
inside the rounding.

    python tests/benchmarks/qad_recovery.py --write-docs
    python tests/benchmarks/qad_recovery.py --tiny

The teacher is the original, SmolLM2-135M-Instruct. All train on the same rows of one kind of text, or on as much text that the
original writes itself, and what counts is measured on four other kinds: of a trained model, what `hf-tpu export --quantize` writes of it, loaded by plain transformers. Learning
rates are chosen on one more kind, with `--validate`. Each result is kept in the working directory, so that a run
that was interrupted goes on, `--seeds` adds to what is there, and `--show` shows it.

`--tiny` takes a tiny model that has learned worked additions, and held-out additions.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from damage import ROOT, add_sources
from kd_recovery import (
    TRAINED_ON,
    VALIDATION,
    Task,
    add_task_arguments,
    log_probs,
    make_cache,
    make_trainer,
    name_task,
    prepare_real,
    prepare_tiny,
    score,
)
from peft import LoraConfig, PeftModel
from qad_recovery_tables import ORIGINAL, ROUNDED, describe, make_tables
from tables import make_parser, publish
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel
from transformers.utils import logging

from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.export.make import export_run


DOCUMENT = ROOT / "docs" / "quantization.md"
#: Directory of the task whose text the original wrote.
OWN_TEXT = "own_text"
#: SmolLM2's `<|endoftext|>`, which begins a document of its pretraining.
DOCUMENT_BEGINS = 0


@dataclass(frozen=True)
class Method:
    """
    A way to bring a rounded model back, or to round it.

    Args:
        learning_rate (`float`):
            Chosen with `--validate`. With 0, nothing is trained.
        at_four_bits (`float`, *optional*):
            The one for 4 bits and more, where less is to be brought back.
        adapters (`str`, *optional*):
            Where the adapters are, as `qat_adapters` says. By default there are none: all weights are trained.
        taught (`bool`, *optional*, defaults to `True`):
            Whether the cached teacher takes the place of the labels.
        scale (`str`, *optional*, defaults to `"max"`):
            As `qat_scale`.
        own_text (`bool`, *optional*, defaults to `False`):
            Whether it trains on text that the original wrote, and leaves the embeddings and the head, which are not rounded, as
            they are: Adam moves the row of every token about equally far, however small its gradient.
    """

    learning_rate: float
    adapters: str | None = None
    taught: bool = True
    at_four_bits: float | None = None
    scale: str = "max"
    own_text: bool = False

    def rate(self, bits: int) -> float:
        """The learning rate for weights of so many bits."""
        return self.learning_rate if self.at_four_bits is None or bits < 4 else self.at_four_bits

    def rates(self) -> str:
        """The learning rates, for people."""
        at_four_bits = "" if self.at_four_bits is None else f" ({self.at_four_bits:g} at 4 bits)"
        return f"{self.learning_rate:g}{at_four_bits}"


METHODS = {
    "rounded only, searched scales": Method(0.0, scale="mse"),
    "recovery LoRA beside, cached teacher": Method(1e-3, "beside"),
    "QAT, labels": Method(3e-4, taught=False, at_four_bits=1e-4),
    "QAT, cached teacher": Method(3e-4, at_four_bits=1e-4),
    "QAT, searched scales, cached teacher": Method(3e-4, at_four_bits=1e-4, scale="mse"),
    "QAT, searched scales, cached teacher, own text": Method(3e-4, at_four_bits=1.5e-4, scale="mse", own_text=True),
    "low-rank QAT, cached teacher": Method(2e-3, "inside", at_four_bits=5e-4),
}
#: What is run with several seeds: bits, and methods that are compared.
COMPARED = (
    (4, 3),
    (
        "recovery LoRA beside, cached teacher",
        "QAT, cached teacher",
        "QAT, searched scales, cached teacher",
        "QAT, searched scales, cached teacher, own text",
    ),
)


@dataclass(frozen=True)
class Row:
    """A model that is measured: how many bits, a name, which is one of [`METHODS`] or `"rounded only"`, and the seed."""

    bits: int
    name: str
    seed: int = 0

    @property
    def directory(self) -> str:
        """Name of its files."""
        return f"int{self.bits}-{self.name.replace(', ', '-').replace(' ', '_')}-{self.seed}"


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """What is measured: all rows with one seed first."""
    for bits in arguments.bits:
        yield Row(bits, ROUNDED)
    for seed in range(arguments.seeds):
        for bits in arguments.bits:
            for name in arguments.methods:
                if seed == 0 or (bits in COMPARED[0] and name in COMPARED[1]):
                    yield Row(bits, name, seed)


@torch.no_grad()
def write_own_text(task: Task) -> Task:
    """
    Let the original write as many rows as are trained on: samples of its own distribution, from the token that separates
    documents. Nothing is written again where they are there.
    """
    arguments, directory = task.arguments, task.directory / OWN_TEXT
    count, length = arguments.batch_size * arguments.steps, arguments.max_length
    file = directory / "data" / "train.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if len(lines) != count or len(json.loads(lines[0])["input_ids"]) != length:
        model = AutoModelForCausalLM.from_pretrained(task.directory / "teacher", dtype=torch.float32)
        start = torch.full((count, 1), DOCUMENT_BEGINS)
        torch.manual_seed(0)
        rows = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=0,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=DOCUMENT_BEGINS,
        )[:, 1:].tolist()
        train = [{"input_ids": row} for row in rows]
        write_splits(directory / "data", {"train": train, "test": train[:1]})
        (directory / "teacher").unlink(missing_ok=True)
        (directory / "teacher").symlink_to((task.directory / "teacher").resolve())
    return replace(task, directory=directory)


def trained_in(row: Row, directory: Path) -> Path:
    """Where a row's text and the teacher's cache are, in the directory of a [`Task`]."""
    return directory / OWN_TEXT if METHODS[row.name].own_text else directory


def make_caches(task: Task) -> None:
    """Make what the methods train on: the text that the original writes, and its cached log-probs."""
    own = {METHODS[name].own_text for name in task.arguments.methods if METHODS[name].learning_rate}
    for trained in [write_own_text(task)] * (True in own) + [task] * (False in own):
        make_cache(trained, student="teacher", bf16=task.arguments.bf16)


def settings_of(row: Row, arguments: argparse.Namespace) -> dict:
    """What makes the trained model: settings of [`TPUSFTConfig`] for a row."""
    method = METHODS[row.name]
    settings = {
        "qat_weight_dtype": f"int{row.bits}",
        "qat_group_size": arguments.group_size,
        "learning_rate": method.rate(row.bits) if arguments.learning_rate is None else arguments.learning_rate,
        "bf16": arguments.bf16,
        "seed": row.seed,
    }
    if method.adapters:
        settings["qat_adapters"] = method.adapters
    if method.scale != "max":
        settings["qat_scale"] = method.scale
    if method.taught:
        settings["kd_cache"] = str(trained_in(row, arguments.work_dir) / "cache")
        settings |= {"kd_alpha": arguments.kd_alpha, "kd_temperature": arguments.kd_temperature}
    return settings


def export(run: Path, output_dir: Path, **settings) -> tuple[PreTrainedModel, int]:
    """Export what a run trained, and load the files by plain transformers."""
    written = export_run(run, output_dir, dtype="bfloat16", overwrite=True, **settings)
    # Unpacked once: PEFT takes no packed layers, and each pass would unpack them.
    unpacked = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(output_dir, dtype=torch.float32, quantization_config=unpacked)
    return model, written.num_bytes


def make(row: Row, task: Task) -> tuple[PreTrainedModel, int]:
    """Train a row, and export it."""
    arguments, original = task.arguments, task.directory / "teacher"
    run, exported = (task.directory / folder / row.directory for folder in ("trained", "exported"))
    asked = {"quantize": f"int{row.bits}", "group_size": arguments.group_size}
    if row.name == ROUNDED:
        return export(original, exported, **asked)
    if not METHODS[row.name].learning_rate:
        return export(original, exported, scale=METHODS[row.name].scale, **asked)
    settings, adapters = settings_of(row, arguments), METHODS[row.name].adapters
    if adapters:
        settings["peft_config"] = LoraConfig(
            r=arguments.rank,
            lora_alpha=arguments.rank,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    trainer = make_trainer(trained_in(row, task.directory), "teacher", arguments, **settings)
    if METHODS[row.name].own_text:
        for end in (trainer.model.get_input_embeddings(), trainer.model.get_output_embeddings()):
            end.requires_grad_(False)
    trainer.train()
    trainer.save_model(str(run))
    del trainer
    if adapters != "beside":
        return export(run, exported, merge=adapters is not None, **asked)
    model, num_bytes = export(original, exported, **asked)
    return PeftModel.from_pretrained(model, run), num_bytes + sum(
        file.stat().st_size for file in run.glob("adapter_model.*")
    )


def compare(task: Task) -> dict[str, list[dict]]:
    """Measure the original and every row. What was measured before, with the same settings, is read."""
    arguments, original = task.arguments, task.directory / "teacher"
    kinds = {kind: batches for group in task.held_out.values() for kind, batches in group.items()}
    measured_with = {"group_size": arguments.group_size, "bf16": arguments.bf16, "kinds": list(kinds)}
    trained_with = {name: vars(arguments)[name] for name in ("steps", "batch_size", "max_length", "rank", "backend")}

    @contextmanager
    def measuring() -> Iterator[None]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=arguments.bf16):
            yield

    @cache
    def teacher() -> dict[str, list[Tensor]]:
        model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
        with measuring():
            return {kind: [log_probs(model, batch) for batch in batches] for kind, batches in kinds.items()}

    def measure(name: str, key: dict, make: Callable[[], tuple[PreTrainedModel, int]]) -> dict | None:
        file = task.directory / "results" / f"{name}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if kept.get("key") != key | measured_with:
            if arguments.show:
                return None
            model, num_bytes = make()
            with measuring():
                result = {kind: score(model, batches, teacher()[kind]) for kind, batches in kinds.items()}
            kept = {"key": key | measured_with, "result": result | {"bytes": num_bytes}}
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(kept), encoding="utf-8")
        print(name, json.dumps(kept["result"]), flush=True)
        return kept["result"]

    def load() -> tuple[PreTrainedModel, int]:
        model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
        return model, 2 * model.num_parameters()

    results = {ORIGINAL: measure(ORIGINAL, {}, load)}
    if results[ORIGINAL] is None:
        raise ValueError(f"Nothing was measured in {task.directory} yet with these settings. Leave --show out.")
    for row in rows(arguments):
        name, key = row.directory, asdict(row)
        if row.name != ROUNDED:
            settings = settings_of(row, arguments)
            name += f"-{settings['learning_rate']:g}"
            key |= trained_with | {name: value for name, value in settings.items() if name != "kd_cache"}
        result = measure(name, key, partial(make, row, task))
        if result is None:
            continue
        results.setdefault(f"int{row.bits}", {}).setdefault(row.name, []).append(result)
        for folder in ("trained", "exported"):
            shutil.rmtree(task.directory / folder / row.directory, ignore_errors=True)
    return results


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    add_sources(parser)
    add_task_arguments(parser)
    parser.set_defaults(backend="cpu", kd_alpha=1.0)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2], help="bits of a weight (default: 4 3 2)")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(default: all)")
    parser.add_argument("--learning_rate", type=float, help="one for all methods (default: each has its own)")
    parser.add_argument("--rank", type=int, default=32, help="rank of adapters (default: 32)")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=True, help="compute in bfloat16 (default: yes)"
    )
    parser.add_argument("--show", action="store_true", help="show what was measured so far, and train nothing")
    parser.add_argument("--seeds", type=int, default=3, help="of the methods that are compared (default: 3)")
    parser.add_argument("--table", help="name of the table in the document (default: that of the benchmark)")
    arguments = name_task(parser.parse_args(argv), "qad_recovery")
    arguments.table = arguments.table or arguments.name
    return arguments


def main() -> None:
    """Run the benchmark and print its tables."""
    arguments = parse_arguments()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    logging.disable_progress_bar()
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    task = (prepare_tiny if arguments.tiny else prepare_real)(arguments, arguments.work_dir)
    # What a model learns of the text that it trains on is not what rounding took.
    task.held_out.pop(TRAINED_ON, None)
    make_caches(task)
    results = compare(task)
    kinds = task.held_out[VALIDATION] if arguments.validate else next(iter(task.held_out.values()))
    tokens = {
        kind: sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches) for kind, batches in kinds.items()
    }
    block = "\n".join([make_tables(results, list(kinds)), "", describe(arguments, METHODS, tokens)])
    publish(arguments, DOCUMENT, arguments.table, block, results)


if __name__ == "__main__":
    main()
