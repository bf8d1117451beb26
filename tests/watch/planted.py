"""A tiny model, and runs in which something is planted that has programs compiled again or reads the device."""

import inspect
import itertools
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from hf_tpu_ext import TPUTrainer, TPUTrainingArguments


WIDTHS = itertools.count(8)
ROWS = [
    {"input_ids": [1 + (i + j) % 15 for j in range(8)], "labels": [1 + i * j % 15 for j in range(8)]}
    for i in range(64)
]


class Tiny(nn.Module):
    """As wide as no other one in this process, for its programs to be compiled."""

    def __init__(self):
        super().__init__()
        width = next(WIDTHS)
        self.embedding = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16)
        self.scale, self.dropout = 1.5, 0.0

    def forward(self, input_ids, labels, attention_mask=None, weight=None):
        logits = self.head(self.embedding(input_ids)) * self.scale
        if self.dropout:
            logits = functional.dropout(logits, self.dropout)
        if attention_mask is not None:
            logits = logits * attention_mask[..., None]
        if weight is not None:
            logits = logits * weight
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten().long()), "logits": logits}


def collate(examples):
    return {key: torch.tensor([example[key] for example in examples]) for key in examples[0]}


def collate_then(step, change):
    """A collator that changes its batch number `step`."""
    calls = itertools.count(1)

    def planted(examples):
        batch = collate(examples)
        if next(calls) == step:
            change(batch)
        return batch

    return planted


def line_of(function, text):
    """`file:line` of a line of a function."""
    lines, first = inspect.getsourcelines(function)
    index = next(index for index, line in enumerate(lines) if text in line)
    return f"{Path(inspect.getsourcefile(function)).name}:{first + index}"


def causes(trainer):
    """Step and cause of each recompile."""
    return [(event.step, event.cause) for event in trainer.watch.events if event.cause is not None]


def said(caplog):
    """The lines about recompiles and reads."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_tpu_ext.watch.")]


def train_tiny(
    output_dir,
    cls=TPUTrainer,
    collator=collate,
    callbacks=(),
    train_dataset=ROWS,
    eval_dataset=None,
    optimizer=None,
    start=True,
    model=None,
    **config,
):
    """Trains eight steps, unless it is told not to start, and returns the trainer."""
    config = {
        "max_steps": 8,
        "logging_steps": 2,
        "max_length": 8,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "run_report": False,
        "step_status": False,
        **config,
    }
    trainer = cls(
        model or Tiny(),
        TPUTrainingArguments(str(output_dir), **config),
        data_collator=collator,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=optimizer,
    )
    if start:
        trainer.train()
    return trainer
