"""Evaluation with metrics, predictions, and ragged last batches."""

import copy
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTTrainer

from hf_tpu_ext import TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.trainers.run import evaluation
from hf_tpu_ext.trainers.run.evaluation import CompiledEvaluation
from hf_tpu_ext.trainers.run.predictions import without_added


CHIPS = int(os.environ.get("CPU_NUM_DEVICES", "1"))
# Transfers of a read of predictions and losses: what is split over several chips is read apart from what is not.
READ = 1 if CHIPS == 1 else 2


def accuracy(prediction):
    labels = prediction.label_ids[:, 1:]
    return {
        "accuracy": (prediction.predictions[:, :-1] == labels)[labels != -100].mean().item(),
        "rows": float(len(labels)),
    }


def most_likely(logits, labels):
    return logits.argmax(-1)


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_compute_metrics_and_predict(runs, bf16):
    """10 rows in batches of 4: the rows that complete the last batch are not predictions."""
    kwargs = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely}
    ours = runs.ours(train=False, kwargs=kwargs, bf16=bf16)
    stock = runs.trainer(SFTTrainer, runs.config(use_cpu=True, bf16=bf16), **kwargs)
    mine, other = ours.evaluate(), stock.evaluate()
    rel = 2**-8 if bf16 else 1e-5
    for key in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_rows"):
        assert mine[key] == pytest.approx(other[key], rel=rel), key
    if not bf16:
        assert mine["eval_accuracy"] == other["eval_accuracy"]
    assert mine["eval_rows"] == 10
    output = ours.predict(ours.eval_dataset)
    assert output.predictions.shape[0] == 10
    assert output.metrics["test_loss"] == pytest.approx(mine["eval_loss"], rel=1e-6)


def own_dataloader(trainer):
    """What accelerate does not know of: it takes every batch for a full one."""
    dataloader = DataLoader(trainer.eval_dataset, batch_size=4, collate_fn=trainer.data_collator)
    trainer.get_eval_dataloader = lambda dataset=None: dataloader


@pytest.mark.parametrize("predicts", [False, True], ids=["loss", "predictions"])
@pytest.mark.parametrize("source", ["streamed", "not dispatched", "own"])
def test_a_short_last_batch_counts_as_upstream_counts_it(runs, source, predicts):
    """10 rows in batches of 4: by its 2 rows where accelerate dispatches the batches of a stream, and else as a full one."""
    kwargs = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely} if predicts else {}
    if source != "own":
        kwargs["eval_dataset"] = runs.eval_dataset.to_iterable_dataset()
    config = {"accelerator_config": {"dispatch_batches": False}} if source == "not dispatched" else {}
    ours = runs.ours(train=False, kwargs=kwargs, **config)
    stock = runs.trainer(SFTTrainer, runs.config(use_cpu=True, **config), **kwargs)
    if source == "own":
        own_dataloader(ours)
        own_dataloader(stock)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)


def test_logits_come_back_in_float32(runs):
    trainer = runs.ours(train=False, bf16=True, kwargs={"compute_metrics": lambda prediction: {}})
    predictions = trainer.predict(trainer.eval_dataset).predictions
    assert predictions.dtype == np.float32 and predictions.shape == (10, predictions.shape[1], 259)


def test_columns_of_a_decoder_are_its_own():
    """Labels were collated to the length that the input was padded to: nothing was added to them, nor to logits."""
    logits, states, labels = torch.zeros(2, 8, 3), torch.zeros(2, 8, 5), torch.zeros(2, 8)
    cut = without_added((logits, states), labels, {"input_ids": (6, 8), "labels": (8, 8)}, ["labels"], None)
    assert cut[0][0].shape == (2, 8, 3) and cut[0][1].shape == (2, 6, 5) and cut[1].shape == (2, 8)


def test_columns_of_spans_are_those_of_the_input():
    """Start and end, of shape `(rows, length)`, and hidden states beside them."""
    start, states, labels = torch.zeros(2, 8), torch.zeros(2, 8, 5), (torch.zeros(2), torch.zeros(2))
    names = ["start_positions", "end_positions"]
    for length in (6, 7):
        cut, _ = without_added(
            (start, start, [states]), labels, {"input_ids": (length, 8)}, names, None, are_spans=True
        )
        assert cut[0].shape == cut[1].shape == (2, length) and cut[2][0].shape == (2, length, 5)


def test_prediction_is_one_program(runs):
    trainer = runs.ours(
        train=False, kwargs={"compute_metrics": accuracy, "preprocess_logits_for_metrics": most_likely}
    )
    trainer.evaluate()
    before = trainer.backend.counters()
    trainer.evaluate()
    assert (trainer.backend.counters() - before).compiles == 0
    assert {kind for kind, _ in trainer.watch.programs} == {"prediction step"}


def test_best_model_is_kept_and_loaded(runs):
    trainer = runs.ours(
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        # The first is the best of them, and not what training ended with.
        greater_is_better=True,
    )
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    best = max(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)


class OtherWeights(torch.optim.SGD):
    """As those without a schedule: evaluations are of other weights than are trained."""

    size = 1

    def eval(self):
        self._be(2)

    def train(self):
        self._be(1)

    @torch.no_grad()
    def _be(self, size):
        if size != self.size:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(size / self.size)
            self.size = size


@pytest.mark.ci
def test_an_optimizer_whose_weights_for_evaluation_are_others(runs, same_logs):
    config = dict(max_steps=6, eval_strategy="steps", eval_steps=2)
    kwargs = {"optimizer_cls_and_kwargs": (OtherWeights, {"lr": 1e-3})}
    same_logs(runs.ours(kwargs=kwargs, **config), runs.stock(kwargs=kwargs, **config))


# ---- The general trainer ----


def token_rows(lengths):
    """Rows of which everything but the first token is a target."""
    return Dataset.from_list([{"input_ids": [*range(1, n + 1)], "labels": [-100, *range(2, n + 1)]} for n in lengths])


class NoLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 4)

    def forward(self, input_ids, attention_mask, labels=None):
        return {"logits": self.embed(input_ids)}


@pytest.fixture
def general(runs):
    """Makes a trainer of the general class with another model than language models, or with the tiny one."""

    def make(
        cls=TPUTrainer,
        model=None,
        train_dataset=None,
        eval_dataset=None,
        compute_metrics=None,
        collator=None,
        **config,
    ):
        settings = dict(output_dir=str(runs.output_dir), report_to="none", disable_tqdm=True, save_strategy="no")
        # Of all chips, which have as many rows together.
        rows = 4 if cls is Trainer else 4 // CHIPS
        settings |= dict(per_device_train_batch_size=rows, per_device_eval_batch_size=rows, use_cpu=cls is Trainer)
        return cls(
            model or AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32),
            TrainingArguments(**{**settings, **config}),
            collator or DataCollatorForSeq2Seq(runs.tokenizer),
            train_dataset,
            eval_dataset,
            runs.tokenizer,
            compute_metrics=compute_metrics,
        )

    return make


def accuracy_of_logits(prediction):
    return accuracy(EvalPrediction(prediction.predictions.argmax(-1), prediction.label_ids))


LENGTHS = [6, 9, 5, 12, 7, 8, 10, 11, 9, 6]


def reads_of(evaluate, backend):
    before = backend.counters()
    metrics = evaluate()
    return metrics, (backend.counters() - before).reads


@pytest.mark.torch_xla
def test_an_evaluation_reads_once(general):
    """Whatever it reads: the loss, or the predictions of all batches. 10 rows are 3 batches."""
    dataset = token_rows(LENGTHS)
    for settings, reads in (
        ({}, 1),
        ({"compute_metrics": accuracy_of_logits}, READ),
        ({"compute_metrics": accuracy_of_logits, "eval_accumulation_steps": 2}, 2 * READ),
    ):
        ours = general(eval_dataset=dataset, **settings)
        other = general(Trainer, eval_dataset=dataset, **settings).evaluate()
        mine, spent = reads_of(ours.evaluate, ours.backend)
        assert spent == reads, settings
        for key in set(other) & {"eval_loss", "eval_accuracy", "eval_rows"}:
            assert mine[key] == pytest.approx(other[key], rel=1e-5), key
        assert mine.keys() >= {key for key in other if "time" not in key}


@pytest.mark.torch_xla
def test_predictions_are_read_before_they_take_too_much_memory(general, monkeypatch):
    ours = general(eval_dataset=token_rows(LENGTHS), compute_metrics=accuracy_of_logits)
    whole = ours.evaluate()
    monkeypatch.setattr(evaluation, "MOST_BYTES_HELD", 1)
    metrics, reads = reads_of(ours.evaluate, ours.backend)
    assert reads == 3 * READ
    assert (metrics["eval_loss"], metrics["eval_accuracy"]) == (whole["eval_loss"], whole["eval_accuracy"])


def test_metrics_batch_by_batch(general):
    def run(cls):
        seen = []

        def count(prediction, compute_result):
            seen.append((len(prediction.label_ids), compute_result))
            return {"batches": float(len(seen))}

        trainer = general(cls, eval_dataset=token_rows(LENGTHS), compute_metrics=count, batch_eval_metrics=True)
        return trainer.evaluate()["eval_batches"], seen

    assert run(TPUTrainer) == run(Trainer) == (3, [(4, False), (4, False), (2, True)])


def shifted(logits, labels):
    return logits[:, :-1].argmax(-1)


# Also of padding, whose values are others with torch_tpu.
@pytest.mark.torch_xla
@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_eval_metrics": True}, {"eval_do_concat_batches": False}],
    ids=["together", "by batch", "not concatenated"],
)
@pytest.mark.parametrize("preprocess", [None, most_likely, shifted])
def test_metrics_are_computed_of_upstreams_columns(general, preprocess, settings):
    """Those of the longest row of a batch, and of the longest batch, whatever length they are padded to."""

    def run(cls):
        seen = []

        def count(prediction, compute_result=True):
            inputs = prediction.inputs["input_ids"] if "batch_eval_metrics" in settings else prediction.inputs
            seen.append((prediction.predictions, prediction.label_ids, inputs))
            return {}

        trainer = general(
            cls, eval_dataset=token_rows(LENGTHS), compute_metrics=count, include_for_metrics=["inputs"], **settings
        )
        trainer.preprocess_logits_for_metrics = preprocess
        trainer.evaluate()
        return seen, trainer.predict(token_rows([3, 4, 2]))

    (ours, output), (theirs, expected) = run(TPUTrainer), run(Trainer)
    ours.append((output.predictions, output.label_ids))
    theirs.append((expected.predictions, expected.label_ids))
    assert len(ours) == len(theirs) > 1
    for mine, other in zip(ours, theirs, strict=True):
        for value, reference in zip(tree_leaves(mine), tree_leaves(other), strict=True):
            assert value.shape == reference.shape
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)


def test_float16_stays(general):
    """Targets of a regression that a collator of the user's gives in float16 are in it for metrics, and the loss is upstream's."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=1, **shape))
    rows = Dataset.from_list([{"input_ids": [*range(1, 6)], "labels": index / 7} for index in range(10)])

    def collate(examples):
        batch = default_data_collator(examples)
        return {**batch, "labels": batch["labels"].half()}

    ours, stock = (
        general(cls, model=copy.deepcopy(model), collator=collate).predict(rows) for cls in (TPUTrainer, Trainer)
    )
    assert ours.label_ids.dtype == stock.label_ids.dtype == np.float16
    assert ours.predictions.dtype == stock.predictions.dtype == np.float32
    np.testing.assert_array_equal(ours.label_ids, stock.label_ids)
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


@pytest.mark.torch_xla
def test_classes_are_no_columns(runs):
    """As many of a row as it is padded to, and the hidden states of its tokens."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=259, num_labels=16, output_hidden_states=True, **shape)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    rows = token_rows([9, 12, 11]).map(lambda row, index: {"labels": index}, with_indices=True)

    def predict(cls, **max_length):
        args_cls = TPUTrainingArguments if max_length else TrainingArguments
        args = args_cls(str(runs.output_dir), report_to="none", use_cpu=not max_length, **max_length)
        return cls(copy.deepcopy(model), args, processing_class=runs.tokenizer).predict(rows).predictions

    ours, theirs = predict(TPUTrainer, max_length=16), predict(Trainer)
    for value, reference in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)
    assert ours[0].shape == (3, 16)


def test_a_model_without_a_loss_is_evaluated_as_upstream_does(general):
    dataset = token_rows([8] * 6).remove_columns("labels")
    metrics = [general(cls, NoLoss(), eval_dataset=dataset).evaluate() for cls in (TPUTrainer, Trainer)]
    assert all("eval_runtime" in entry and "eval_loss" not in entry for entry in metrics)


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("compute_metrics", [None, accuracy_of_logits], ids=["loss", "predictions"])
def test_a_batch_without_a_label_counts_as_upstream_counts_it(general, compute_metrics, filters):
    """The mean of none is NaN."""
    rows = token_rows([8] * 12).to_list()
    without = [{**row, "labels": [-100] * 8} if 4 <= number < 8 else row for number, row in enumerate(rows)]
    settings = dict(eval_dataset=Dataset.from_list(without), compute_metrics=compute_metrics)
    losses = [
        general(cls, logging_nan_inf_filter=filters, **settings).evaluate()["eval_loss"]
        for cls in (TPUTrainer, Trainer)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, nan_ok=True)
    assert np.isfinite(losses[0]) == filters


def test_the_batch_size_may_change_between_evaluations(general):
    trainer = general(eval_dataset=token_rows(LENGTHS))
    losses = []
    for rows in (4, 8, 2):
        trainer.args.per_device_eval_batch_size = rows
        losses.append(trainer.evaluate()["eval_loss"])
    other = general(Trainer, eval_dataset=token_rows(LENGTHS), per_device_eval_batch_size=10).evaluate()["eval_loss"]
    trainer.args.per_device_eval_batch_size = 10
    assert trainer.evaluate()["eval_loss"] == pytest.approx(other, rel=1e-5)
    assert all(loss > 0 for loss in losses)


def test_rows_to_evaluate_that_are_longer_than_those_to_train_on(general):
    """The lengths of both are looked at at the start."""
    datasets = {"short": token_rows([7, 12, 9, 8]), "long": token_rows([41, 35, 20, 33])}
    mine, other = (
        general(cls, train_dataset=token_rows([5, 14, 9, 8]), eval_dataset=datasets).evaluate()
        for cls in (TPUTrainer, Trainer)
    )
    for name in datasets:
        assert mine[f"eval_{name}_loss"] == pytest.approx(other[f"eval_{name}_loss"], rel=1e-5)


@pytest.mark.parametrize("what", ["all", "non_padding"])
def test_input_tokens_are_counted_as_upstream_does(general, what):
    """Its collator's padding included, and that to a declared length left out."""

    def seen(cls):
        config = dict(num_train_epochs=1, include_num_input_tokens_seen=what, train_sampling_strategy="sequential")
        trainer = general(cls, train_dataset=token_rows(LENGTHS), **config)
        trainer.train()
        return trainer.state.num_input_tokens_seen

    assert seen(TPUTrainer) == seen(Trainer) == {"all": 4 * 12 + 4 * 11 + 2 * 9, "non_padding": sum(LENGTHS)}[what]


@pytest.mark.parametrize("what", ["all", "non_padding"])
def test_input_tokens_of_rows_without_a_mask_are_counted_as_upstream_does(general, runs, what):
    """By the pad token, and not by the mask that batches get before they are sent."""
    pad = runs.tokenizer.pad_token_id
    ids = [[5, 6, 7, pad, pad, pad], [5, 6, 7, 8, 9, 10]]
    rows = Dataset.from_list(
        [{"input_ids": row, "labels": [-100 if token == pad else token for token in row]} for row in ids]
    )

    def seen(cls):
        config = dict(max_steps=1, per_device_train_batch_size=2, include_num_input_tokens_seen=what)
        trainer = general(cls, train_dataset=rows, collator=default_data_collator, **config)
        trainer.train()
        return trainer.state.num_input_tokens_seen

    assert seen(TPUTrainer) == seen(Trainer) == {"all": 12, "non_padding": 9}[what]


@pytest.mark.parametrize(
    ("rows", "fix"), [(10, "per_device_eval_batch_size=5 repeats none"), (9, "until 2 divides them"), (16, None)]
)
def test_rows_that_do_not_fill_the_batches_of_processes(caplog, rows, fix):
    """What accelerate makes of 10 rows in batches of 8: rows of the beginning fill the second one's."""
    processes = SimpleNamespace(count=2)
    trainer = SimpleNamespace(
        args=SimpleNamespace(eval_batch_size=8),
        backend=SimpleNamespace(processes=processes),
        is_world_process_zero=lambda: True,
        _said=set(),
    )
    for _ in range(2):
        # A loader of another library has no dataset.
        CompiledEvaluation._say_rows_repeated(trainer, [])
        CompiledEvaluation._say_rows_repeated(trainer, DataLoader(range(rows)))
    assert caplog.text.count("do not fill batches of 8 on 2 processes") == (fix is not None)
    assert fix is None or fix in caplog.text
    size = 5 if rows == 10 else 8
    shards = [BatchSamplerShard(BatchSampler(range(rows), size, False), 2, index) for index in range(2)]
    seen = [row for shard in shards for batch in shard for row in batch]
    assert (len(seen) == rows) == (rows != 9)
