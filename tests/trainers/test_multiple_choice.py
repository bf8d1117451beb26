"""Rows of several choices, as `AutoModelForMultipleChoice` takes them, are padded to the longest choice."""

import random

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForMultipleChoice, DataCollatorForMultipleChoice, Trainer, TrainingArguments

from hf_tpu_ext import TPUTrainer
from hf_tpu_ext.trainers.run.lengths import row_lengths


def rows(count, seed=0):
    rng = random.Random(seed)
    ids = [[[rng.randrange(5, 50) for _ in range(rng.randint(3, 20))] for _ in range(2)] for _ in range(count)]
    masks = [[[1] * len(choice) for choice in row] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": masks, "label": [row % 2 for row in range(count)]})


def test_lengths_are_those_of_the_longest_choice():
    data = rows(9)
    assert row_lengths(data) == [max(map(len, row)) for row in data["input_ids"]]
    assert row_lengths(data.select([7, 2, 5])) == [row_lengths(data)[row] for row in (7, 2, 5)]


@pytest.mark.ci
def test_it_trains_as_with_upstreams_trainer(xla, runs):
    """As upstream's example of SWAG: batches of ever other lengths, and a last one of fewer rows."""

    def train(cls):
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        args = TrainingArguments(
            str(runs.output_dir),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            optim="sgd",
            learning_rate=0.1,
            report_to="none",
            include_num_input_tokens_seen="non_padding",
            disable_tqdm=True,
            use_cpu=cls is Trainer,
        )
        trainer = cls(
            BertForMultipleChoice(config),
            args,
            train_dataset=rows(10),
            eval_dataset=rows(6, 1),
            processing_class=runs.tokenizer,
            data_collator=DataCollatorForMultipleChoice(runs.tokenizer),
            compute_metrics=lambda given: {"sum": float(given.predictions.sum())},
        )
        trainer.train()
        return trainer.state.log_history

    mine, other = train(TPUTrainer), train(Trainer)
    for logged, expected in zip(mine, other, strict=True):
        for key in (key for key in expected if not key.endswith(("_runtime", "_per_second", "total_flos"))):
            assert logged[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-7), key
