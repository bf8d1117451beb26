"""
How much of what rounding took from a model a short LoRA training brings back: from the labels alone, from a cached teacher
and from an online teacher.

    python tests/benchmarks/kd_recovery.py --write-docs
    python tests/benchmarks/kd_recovery.py --tiny --write-docs

The teacher is SmolLM2-135M-Instruct, and the student the same model with its linear layers rounded group-wise to 3 bits. All
train on text of one kind, with the same initial adapters, rows, order and settings. What counts as recovery is measured on
text of other kinds, since on the kind that it trains on a model also learns what its teacher never knew: the undamaged
teacher, trained in the same way, shows how much. Settings are chosen on one more kind of text, with `--validate`.

`--tiny` takes a tiny model that has learned worked additions, and held-out additions.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from damage import DOCUMENT, add_arguments, damage, prepare
from datasets import load_dataset
from kd_recovery_tables import Results, cached_against_online, describe, make_tables
from kd_texts import download, passages, read_texts
from peft import LoraConfig
from tables import make_parser, publish
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.cli.main import main as hf_tpu
from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model


TOP_K = 128
#: By method, the model that is trained and, as settings that name folders, its teacher.
METHODS = {
    "labels alone": ("student", {}),
    "cached teacher": ("student", {"kd_cache": "cache"}),
    "online teacher": ("student", {"kd_teacher": "teacher"}),
    "teacher, trained on the labels": ("teacher", {}),
}
#: Groups of kinds besides the first one: held-out text of the kind trained on, and text to choose settings on.
TRAINED_ON, VALIDATION = "the kind trained on", "validation text"
#: Passages of a kind that is measured.
PASSAGES = 16

Batches = list[dict[str, Tensor]]


@dataclass
class Task:
    """
    What is trained and measured.

    Args:
        directory (`Path`):
            Holds `teacher` and `student` (models), `data`, and `cache` once it is made.
        held_out (`dict[str, dict[str, list]]`):
            By group of kinds and by kind the batches to measure on: `input_ids` and `labels` of shape `(batch, length)`.
        arguments (`argparse.Namespace`):
            The command line.
    """

    directory: Path
    held_out: dict[str, dict[str, Batches]]
    arguments: argparse.Namespace


def make_trainer(directory: Path, model: str, arguments: argparse.Namespace, **settings) -> TPUSFTTrainer:
    """Make a trainer."""
    peft_config = settings.pop("peft_config", None)
    data = load_dataset("json", data_dir=str(directory / "data"))
    common = {
        "output_dir": str(directory / "runs"),
        "backend": arguments.backend,
        "max_length": arguments.max_length,
        "per_device_train_batch_size": arguments.batch_size,
        "max_steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TPUSFTTrainer(
        AutoModelForCausalLM.from_pretrained(directory / model, dtype=torch.float32),
        TPUSFTConfig(**{**common, **settings}),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(directory / "teacher"),
        peft_config=peft_config,
    )


def log_probs(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """
    A model's log-probabilities of the next token.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model on the CPU.
        batch (`dict[str, torch.Tensor]`):
            With `input_ids` of shape `(batch, length)`. Padding is on the right, where it changes nothing.

    Returns:
        `torch.Tensor` of shape `(batch, length - 1, vocabulary)`: Log-probabilities.
    """
    return model(batch["input_ids"]).logits[:, :-1].float().log_softmax(-1)


def score(model: PreTrainedModel, batches: Batches, teacher: list[Tensor]) -> dict[str, float]:
    """Measure a model on held-out text, by plain transformers."""
    model.eval()
    loss = kl = count = 0
    for batch, theirs in zip(batches, teacher, strict=True):
        own, labels = log_probs(model, batch), batch["labels"][:, 1:]
        mask = labels != -100
        loss -= own.gather(-1, labels.clamp(min=0)[..., None])[..., 0][mask].double().sum().item()
        kl += (theirs.exp() * (theirs - own)).sum(-1)[mask].double().sum().item()
        count += mask.sum().item()
    return {"loss": loss / count, "kl": kl / count}


def make_cache(task: Task, student: str = "student", bf16: bool = False) -> None:
    """Run `hf-tpu cache-teacher`. Does nothing where the cache is there."""
    directory, arguments = task.directory, task.arguments
    hf_tpu(
        [
            "cache-teacher",
            f"--model_name_or_path={directory / student}",
            f"--kd_teacher={directory / 'teacher'}",
            f"--dataset_name={directory / 'data'}",
            f"--kd_cache={directory / 'cache'}",
            f"--kd_top_k={TOP_K}",
            f"--kd_temperature={arguments.kd_temperature}",
            f"--max_length={arguments.max_length}",
            f"--backend={arguments.backend}",
            f"--batch_size={arguments.batch_size}",
            "--eval_strategy=steps",
            f"--bf16={bf16}",
        ]
    )


def train(task: Task, method: str, seed: int) -> PreTrainedModel:
    """Train with a method."""
    model, teacher = METHODS[method]
    arguments = task.arguments
    if teacher:
        teacher = {name: str(task.directory / folder) for name, folder in teacher.items()}
        teacher |= {"kd_alpha": arguments.kd_alpha, "kd_temperature": arguments.kd_temperature}
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(task.directory, model, arguments, seed=seed, peft_config=lora, **teacher)
    trainer.train()
    return trainer.model.to("cpu")


@torch.no_grad()
def compare(task: Task) -> Results:
    """Measure teacher and student, and train and measure with each method and seed."""
    kinds = {kind: batches for group in task.held_out.values() for kind, batches in group.items()}
    models = {
        name: AutoModelForCausalLM.from_pretrained(task.directory / name, dtype=torch.float32)
        for name in ("teacher", "student")
    }
    teacher = {kind: [log_probs(models["teacher"], batch) for batch in batches] for kind, batches in kinds.items()}

    def measure(name: str, model: PreTrainedModel) -> None:
        result = {kind: score(model, batches, teacher[kind]) for kind, batches in kinds.items()}
        print(name, json.dumps(result), flush=True)
        results.setdefault(name, []).append(result)

    results = {}
    for name, model in models.items():
        measure(name, model)
    for seed in range(task.arguments.seeds):
        for method in task.arguments.methods:
            with torch.enable_grad():
                model = train(task, method, seed)
            measure(method, model)
    return results


def prepare_real(arguments: argparse.Namespace, directory: Path) -> Task:
    """Make the task of SmolLM2."""
    functions = prepare(arguments)["test"]["text"]
    download(directory / "texts")
    texts = {**read_texts(directory / "texts"), "code": "\n\n".join(functions)}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)

    def cut(kind: str, part: tuple[float, float] = (0, 1)) -> Batches:
        rows = passages(tokenizer, texts[kind], arguments.max_length, PASSAGES, part)
        return [{"input_ids": batch, "labels": batch} for batch in rows.split(8)]

    held_out = {
        "other kinds of text": {kind: cut(kind) for kind in ("fiction", "play", "verse", "code")},
        TRAINED_ON: {"proceedings": cut("proceedings", (0.75, 1))},
        VALIDATION: {"reference": cut("reference")},
    }
    rows = passages(
        tokenizer, texts["proceedings"], arguments.max_length, arguments.batch_size * arguments.steps, (0, 0.75)
    ).tolist()
    write_splits(directory / "data", {"train": [{"input_ids": row} for row in rows], "test": [{"input_ids": rows[0]}]})
    (directory / "teacher").unlink(missing_ok=True)
    (directory / "teacher").symlink_to(arguments.model_dir.resolve())
    return Task(directory, held_out, arguments)


def prepare_tiny(arguments: argparse.Namespace, directory: Path) -> Task:
    """
    Make the task of the tiny model, and train its teacher. Arguments and result are those of [`prepare_real`].
    """
    make_arithmetic(directory / "data")
    make_model(directory / "teacher")
    trainer = make_trainer(
        directory,
        "teacher",
        arguments,
        max_steps=arguments.teacher_steps,
        learning_rate=3e-3,
        per_device_train_batch_size=16,
    )
    trainer.train()
    trainer.model.to("cpu").save_pretrained(directory / "teacher")
    rows = list(trainer.eval_dataset)
    batches = [trainer.data_collator(rows[begin : begin + 8]) for begin in range(0, len(rows), 8)]
    return Task(directory, {"held-out additions": {"additions": batches}}, arguments)


def save_damaged(task: Task) -> None:
    """Make the student: the teacher with rounded weights."""
    directory, arguments = task.directory, task.arguments
    student = AutoModelForCausalLM.from_pretrained(directory / "teacher", dtype=torch.float32)
    damage(student, arguments.bits, arguments.group_size)
    student.save_pretrained(directory / "student")
    AutoTokenizer.from_pretrained(directory / "teacher").save_pretrained(directory / "student")


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a [`Task`] is made of, and how it is trained, to a command line."""
    parser.add_argument("--tiny", action="store_true", help="the tiny model and worked additions")
    parser.add_argument(
        "--validate", action="store_true", help="measure on the text to choose settings on, and no other"
    )
    parser.add_argument("--backend", default="xla", choices=("xla", "cpu"), help="what to train on (default: xla)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default: 60)")
    parser.add_argument(
        "--teacher_steps", type=int, default=600, help="with --tiny: those of the teacher (default: 600)"
    )
    parser.add_argument("--batch_size", type=int, default=4, help="rows of a batch (default: 4)")
    parser.add_argument("--max_length", type=int, default=128, help="tokens of a row (default: 128)")
    parser.add_argument("--kd_alpha", type=float, default=0.9, help="weight of the teacher (default: 0.9)")
    parser.add_argument("--kd_temperature", type=float, default=1.0, help="(default: 1)")
    parser.add_argument("--work_dir", type=Path, help="what is made on the way (default: in .cache)")


def name_task(arguments: argparse.Namespace, name: str) -> argparse.Namespace:
    """Name a benchmark's table and working directory."""
    arguments.name = f"{name}_tiny" if arguments.tiny else name
    arguments.work_dir = arguments.work_dir or Path(".cache", arguments.name)
    return arguments


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, DOCUMENT)
    add_arguments(parser)
    add_task_arguments(parser)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="(default: all)")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="(default: 1e-3)")
    parser.add_argument("--seeds", type=int, help="how many (default: 2; 5 with --tiny)")
    arguments = parser.parse_args(argv)
    arguments.seeds = arguments.seeds or (5 if arguments.tiny else 2)
    return name_task(arguments, "kd_recovery")


def main() -> None:
    """Run the benchmark and print its tables."""
    arguments = parse_arguments()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    task = (prepare_tiny if arguments.tiny else prepare_real)(arguments, arguments.work_dir)
    validation = task.held_out.pop(VALIDATION, {})
    if arguments.validate:
        task.held_out = {VALIDATION: validation}
    save_damaged(task)
    make_cache(task)
    results = compare(task)
    groups = {group: list(kinds) for group, kinds in task.held_out.items()}
    tokens = {
        kind: sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for kinds in task.held_out.values()
        for kind, batches in kinds.items()
    }
    lines = [make_tables(results, groups), "", describe(arguments, tokens)]
    if arguments.seeds > 1 and set(METHODS) == set(arguments.methods):
        lines.append(cached_against_online(results, next(iter(groups.values()))))
    block = "\n".join(lines)
    publish(arguments, DOCUMENT, arguments.name, block, {"groups": groups, "results": results})


if __name__ == "__main__":
    main()
