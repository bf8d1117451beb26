"""Evaluations of the text that a model writes (`predict_with_generate`)."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from fixes import assert_fixes
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DataCollatorForSeq2Seq

from hf_tpu_ext import TPUSFTConfig, TPUTrainer, TPUTrainingArguments


NEW = 5


def rows_of(lengths):
    """Prompts of these lengths, and three tokens with a label after each."""
    rng = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = rng.integers(5, 250, length + 3).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * length + ids[length:]})
    return Dataset.from_list(rows)


LENGTHS = [1, 4, 7, 12, 3, 9, 2, 12, 5, 6]


def eager(model, rows):
    """What `generate` of transformers writes after each prompt by itself, and -100."""
    found = np.full((len(rows), NEW), -100)
    for place, row in enumerate(rows):
        prompt = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == -100]
        ids = torch.tensor([prompt])
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        found[place, : made.shape[1] - len(prompt)] = made[0, len(prompt) :].numpy()
    return found


class Metrics:
    """`compute_metrics`, which notes what it was given."""

    def __call__(self, prediction):
        self.predictions, self.labels = prediction.predictions, prediction.label_ids
        return {"longest": float((prediction.predictions != -100).sum(1).max())}


def model_of(runs):
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32).eval()
    # Some texts end early, the model being what it is.
    model.generation_config.eos_token_id = list(range(5, 60))
    model.generation_config.do_sample = False
    return model


@pytest.mark.ci
@pytest.mark.parametrize("use_cpu", [False, True], ids=["xla", "cpu"])
def test_general_trainer(runs, tmp_path, use_cpu):
    """10 rows in batches of 4: tokens are eager's, the loss and labels those of an evaluation without them."""
    rows, metrics = rows_of(LENGTHS), Metrics()
    expected = eager(model_of(runs), rows)
    assert len({(row != -100).sum() for row in expected}) > 1
    made = {}
    for writes in (False, True):
        settings = {"predict_with_generate": True, "generation_max_new_tokens": NEW} if writes else {}
        args = TPUTrainingArguments(
            output_dir=str(tmp_path),
            per_device_eval_batch_size=4,
            report_to="none",
            use_cpu=use_cpu,
            max_steps=2,
            learning_rate=1e-2,
            **settings,
        )
        made[writes] = TPUTrainer(
            model=model_of(runs),
            args=args,
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=runs.tokenizer,
            data_collator=DataCollatorForSeq2Seq(runs.tokenizer),
            compute_metrics=metrics,
        )
    without, trainer = made[False].evaluate(), made[True].evaluate()
    assert trainer["eval_loss"] == pytest.approx(without["eval_loss"], rel=1e-5)
    np.testing.assert_array_equal(metrics.predictions, expected)
    assert metrics.labels.shape[0] == 10 and trainer["eval_longest"] == NEW
    trainer = made[True]
    if not use_cpu:
        before = trainer.backend.counters()
        trainer.evaluate()
        spent = trainer.backend.counters() - before
        # Of each batch a loss, a prefill and the tokens after it; the tokens are read batch by batch, the losses together.
        assert (spent.compiles, spent.executions, spent.reads) == (0, 9, 4)
        assert {kind for kind, _ in trainer.watch.programs} == {"prediction step", "prefill", "decode"}
    trainer.train()
    # With the weights of now, and a test set whose last batch is full.
    weights = trainer.backend.fetch(dict(trainer.model.state_dict(keep_vars=True)))
    model = model_of(runs)
    model.load_state_dict(weights)
    # Training adds the end of the tokenizer.
    model.generation_config = trainer.model.generation_config
    rows = rows.select(range(8))
    output = trainer.predict(rows)
    np.testing.assert_array_equal(output.predictions, eager(model, rows))
    assert np.any(output.predictions != expected[:8])


def test_supervised_fine_tuning(runs):
    """Prompts of SFT are what completion_only_loss leaves out."""
    metrics = Metrics()
    rows = Dataset.from_list([{"prompt": "abcdef"[:count], "completion": "xyz"} for count in (2, 5, 3)])
    trainer = runs.ours(
        train=False,
        config_cls=TPUSFTConfig,
        kwargs={"compute_metrics": metrics, "train_dataset": rows, "eval_dataset": rows},
        predict_with_generate=True,
        generation_max_new_tokens=NEW,
    )
    trainer.evaluate()
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32).eval()
    np.testing.assert_array_equal(metrics.predictions, eager(model, trainer.eval_dataset))


@pytest.mark.parametrize("use_cpu", [False, True], ids=["xla", "cpu"])
def test_a_classifier_has_no_text(runs, tmp_path, use_cpu):
    model = AutoModelForSequenceClassification.from_pretrained(runs.model_dir, dtype=torch.float32)

    def check(**settings):
        TPUTrainer(model, TPUTrainingArguments(tmp_path, use_cpu=use_cpu, bf16=False, report_to="none", **settings))

    assert_fixes(check, {"predict_with_generate": True}, "Leave predict_with_generate out")


def test_bad_input(runs):
    with pytest.raises(ValueError, match="generation_max_new_tokens=5 has no effect without"):
        TPUSFTConfig(output_dir="unused", generation_max_new_tokens=5)
    with pytest.raises(ValueError, match="generation_max_new_tokens=0 is not positive"):
        TPUSFTConfig(output_dir="unused", predict_with_generate=True, generation_max_new_tokens=0)
    settings = {"config_cls": TPUSFTConfig, "predict_with_generate": True, "train": False}
    with pytest.raises(ValueError, match="packed rows have several"):
        runs.ours(**settings, packing=True, max_length=64)
    # At the first evaluation, steps would be lost.
    model = model_of(runs)
    model.generation_config.no_repeat_ngram_size = 3
    with pytest.raises(
        ValueError, match="where it is the model's own: model.generation_config.no_repeat_ngram_size = None"
    ):
        runs.ours(model, **settings)
    trainer = runs.ours(**settings, completion_only_loss=False, kwargs={"compute_metrics": Metrics()})
    with pytest.raises(ValueError, match="row 0 of a batch has a label at its first token"):
        trainer.evaluate()
