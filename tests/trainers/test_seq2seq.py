"""Encoder-decoder models with upstream's collator, and upstream's `Seq2SeqTrainer` on XLA."""

import os
import random
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_tpu_ext import TPUSeq2SeqTrainer, TPUSeq2SeqTrainingArguments, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.examples.tiny import make_tokenizer
from hf_tpu_ext.trainers import TPUTrainerMixin


LONGEST = 8


def t5():
    torch.manual_seed(0)
    sizes = dict(vocab_size=259, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    tokens = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **sizes, **tokens))


def bart():
    torch.manual_seed(0)
    sizes = dict(vocab_size=259, d_model=32, max_position_embeddings=32, dropout=0.0)
    parts = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in dict(layers=1, attention_heads=4, ffn_dim=32).items()
    }
    tokens = dict(pad_token_id=0, bos_token_id=2, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=1)
    return BartForConditionalGeneration(BartConfig(**sizes, **parts, **tokens))


def rows_of(count):
    rng = np.random.default_rng(0)
    rows = []
    for index in range(count):
        # Inputs and labels are padded each to their longest.
        ids, labels = (rng.integers(5, 250, length).tolist() for length in (3 + index, 4 + index % 3))
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return Dataset.from_list(rows)


def make(cls, args_cls, runs, collator=None, model=t5, **config):
    defaults = dict(
        max_steps=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        logging_steps=1,
        learning_rate=1e-2,
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not issubclass(cls, TPUTrainerMixin),
    )
    args = args_cls(str(runs.output_dir), **{**defaults, **config})
    made, rows = model(), rows_of(8)
    # With label smoothing, the labels are not for the model.
    smoothed = made if config.get("label_smoothing_factor") else None
    collate = DataCollatorForSeq2Seq(runs.tokenizer, model=smoothed, **(collator or {}))
    return cls(
        made, args, collate, train_dataset=rows, eval_dataset=rows.select(range(4)), processing_class=runs.tokenizer
    )


@pytest.mark.parametrize(
    ("collator", "declared"),
    [({}, {"max_length": 16}), ({"padding": "max_length", "max_length": 12}, {}), ({}, {})],
    ids=["declared", "by the collator", "not declared"],
)
def test_training_by_upstreams_collator(runs, collator, declared):
    def losses(trainer):
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = losses(make(Trainer, TrainingArguments, runs, collator))
    trainer = make(TPUTrainer, TPUTrainingArguments if declared else TrainingArguments, runs, collator, **declared)
    assert len(stock) == 3 and losses(trainer) == pytest.approx(stock, rel=1e-5)
    assert trainer.watch.recompiles == 0


@pytest.mark.ci
def test_text_is_that_of_generate(runs):
    """By arguments of the call, too, and after training."""
    text = dict(predict_with_generate=True, generation_max_length=LONGEST)
    mine, stock = (make(cls, Seq2SeqTrainingArguments, runs, **text) for cls in (TPUSeq2SeqTrainer, Seq2SeqTrainer))
    rows = stock.eval_dataset

    def same(rows, **told):
        ours, theirs = (trainer.predict(rows, **told) for trainer in (mine, stock))
        np.testing.assert_array_equal(ours.predictions, theirs.predictions)
        # Upstream pads labels to the text with a token, and other labels with -100.
        np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
        assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)
        return ours, theirs

    ours, _ = same(rows)
    model = t5().eval()
    for row, written in zip(rows, ours.predictions, strict=True):
        alone = model.generate(torch.tensor([row["input_ids"]]), max_length=LONGEST, do_sample=False)[0]
        np.testing.assert_array_equal(written[: len(alone)], alone)
    before = mine.backend.counters()
    same(rows)
    # It is written on the host, and the loss is a known program.
    assert (mine.backend.counters() - before).compiles == 0
    same(rows, max_length=5)
    same(rows, num_beams=2)
    # The last batch has one row.
    same(rows.select(range(3)), num_beams=2, num_return_sequences=2)
    for trainer in (mine, stock):
        trainer.train()
    same(rows)
    # The loss of the one row of a last batch counts as that of two, as upstream's.
    for dataset in (rows, rows.select(range(3))):
        mine_loss, stock_loss = (trainer.evaluate(dataset, max_length=5)["eval_loss"] for trainer in (mine, stock))
        assert mine_loss == pytest.approx(stock_loss, rel=1e-5)


def test_what_is_told_of_text_that_generate_writes(runs, caplog):
    """Its weights and buffers are read by the trainer, and why batches are traced is no sync of the user's. A loss alone replays."""
    trainer = make(TPUSeq2SeqTrainer, Seq2SeqTrainingArguments, runs, model=bart, predict_with_generate=True)
    strays = trainer.backend.insight.stray_reads()
    trainer.evaluate()
    assert "Replay of evaluation" not in caplog.text
    trainer.predict(trainer.eval_dataset, max_length=5)
    (line,) = (record.message for record in caplog.records if "Replay of evaluation" in record.message)
    assert line.endswith("every batch is traced: generate writes text for each of them (predict_with_generate=True).")
    assert trainer.backend.insight.stray_reads() == strays


def test_predictions_of_a_dataset_that_only_the_call_names(runs):
    """Its rows are of other lengths than any that are known."""

    def predict(cls):
        args = Seq2SeqTrainingArguments(
            str(runs.output_dir), report_to="none", per_device_eval_batch_size=2, use_cpu=cls is Seq2SeqTrainer
        )
        collate = DataCollatorForSeq2Seq(runs.tokenizer)
        trainer = cls(t5(), args, collate, processing_class=runs.tokenizer)
        return trainer.predict(rows_of(7)), trainer.evaluate(rows_of(5))["eval_loss"], trainer

    (stock, stock_loss, _), (ours, loss, trainer) = predict(Seq2SeqTrainer), predict(TPUSeq2SeqTrainer)
    assert loss == pytest.approx(stock_loss, rel=1e-5)
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)
    np.testing.assert_array_equal(ours.label_ids, stock.label_ids)
    assert trainer.lengths == [16]


@pytest.mark.parametrize(
    ("model", "smoothing"),
    [
        pytest.param(t5, 0.0, id="t5"),
        pytest.param(bart, 0.1, id="bart, smoothed", marks=pytest.mark.slow),
        pytest.param(t5, 0.1, id="t5, smoothed", marks=pytest.mark.slow),
        pytest.param(bart, 0.0, id="bart", marks=pytest.mark.slow),
    ],
)
def test_losses_and_predictions_are_upstreams(runs, model, smoothing):
    """With an evaluation in training, whose text is counted."""
    found = []
    for cls, args_cls in (
        (TPUSeq2SeqTrainer, TPUSeq2SeqTrainingArguments),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    ):
        text = dict(predict_with_generate=True, generation_max_length=LONGEST)
        trainer = make(
            cls,
            args_cls,
            runs,
            model=model,
            label_smoothing_factor=smoothing,
            eval_strategy="steps",
            eval_steps=3,
            **text,
        )
        trainer.compute_metrics = lambda prediction: {"tokens": float((prediction.predictions > 1).sum())}
        trainer.train()
        found.append([log.get("loss", log.get("eval_loss")) for log in trainer.state.log_history[:-1]])
        found[-1] += [log["eval_tokens"] for log in trainer.state.log_history if "eval_tokens" in log]
    assert len(found[0]) == 5 and found[0] == pytest.approx(found[1], rel=1e-5)


def test_text_of_a_general_trainer_names_the_other(runs):
    with pytest.raises(
        ValueError, match=r"T5ForConditionalGeneration is an .* Train it with hf_tpu_ext.TPUSeq2SeqTrainer"
    ):
        make(TPUTrainer, TPUTrainingArguments, runs, predict_with_generate=True)


@pytest.mark.slow
def test_recipe_learns_to_copy(tmp_path):
    """Three letters, of a tiny T5 with the tokenizer of the tiny models."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_tokenizer(tmp_path / "model"))
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, dropout_rate=0.0)
    tokens = dict(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    T5ForConditionalGeneration(T5Config(**sizes, **tokens)).save_pretrained(tmp_path / "model")
    # Without the generation's end, the tokenizer of these models adds none.
    rng = random.Random(0)
    rows = [{"text": letter * 3, "target": letter * 3 + "<|im_end|>"} for letter in rng.choices("abcdefgh", k=264)]
    write_splits(tmp_path / "data", {"train": rows[8:], "test": rows[:8]})
    script = Path(__file__).parents[2] / "recipes" / "seq2seq_t5.py"
    settings = dict(
        model_name_or_path=tmp_path / "model",
        dataset_name=tmp_path / "data",
        output_dir=tmp_path / "run",
        max_length=8,
        max_target_length=8,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        num_train_epochs=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        predict_with_generate=True,
    )
    words = [f"--{name}={value}" for name, value in settings.items()]
    result = forked.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=600, env=dict(os.environ)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "'eval_equal': 1.0" in result.stdout, result.stdout[-2000:]
