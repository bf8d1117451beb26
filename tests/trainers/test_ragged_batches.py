"""The last batch of an epoch, of 33 rows in batches of 8, is completed where that changes nothing, and else left as it is."""

import os
import random
import sys
from functools import partial
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    default_data_collator,
)

from hf_tpu_ext import TPUTrainer


ROWS, BATCH, LENGTH, WORDS = 33, 8, 12, 50
BERT = dict(
    vocab_size=WORDS,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
RNG = random.Random(0)


@pytest.fixture(autouse=True)
def same_rows():
    """Whichever tests ran before."""
    RNG.seed(0)


def tokens(length=LENGTH):
    return [RNG.randrange(3, WORDS) for _ in range(length)]


def texts(**targets):
    """Rows of tokens with targets, each of which is made by a function."""
    rows = [{"input_ids": tokens(), "attention_mask": [1] * LENGTH} for _ in range(ROWS)]
    return Dataset.from_list([{**row, **{name: make(row) for name, make in targets.items()}} for row in rows])


def images(labels):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    rows = [{"pixel_values": image.tolist(), "labels": RNG.randrange(labels)} for image in pixels]
    return Dataset.from_list(rows).with_format("torch")


def same_tokens(row):
    return row["input_ids"]


class Embedded(nn.Module):
    """Tokens to a vector for each row: the mean over those that are not masked."""

    def __init__(self, outputs=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, outputs)

    def pool(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))


class SquaredError(Embedded):
    def forward(self, input_ids, attention_mask, y):
        pooled = self.pool(input_ids, attention_mask)
        return {"loss": nn.functional.mse_loss(pooled, y), "logits": pooled}


class Contrastive(Embedded):
    def forward(self, input_ids, attention_mask):
        pooled = self.pool(input_ids, attention_mask)
        other = pooled.roll(1, dims=1)
        loss = nn.functional.cross_entropy(pooled @ other.T, torch.arange(len(pooled), device=pooled.device))
        return {"loss": loss, "logits": pooled}


class Pooled(Embedded):
    """A classifier whose rows without a token are 0 / 0."""

    def forward(self, input_ids, attention_mask, labels):
        pooled = self.pool(input_ids, attention_mask)
        return {"loss": nn.functional.cross_entropy(pooled, labels), "logits": pooled}


class Alone(Embedded):
    def forward(self, input_ids):
        return {"loss": self.head(self.embed(input_ids)).square().mean()}


class Penalised(BertForMaskedLM):
    def forward(self, input_ids, attention_mask, labels):
        outputs = super().forward(input_ids, attention_mask, labels=labels)
        outputs.loss = outputs.loss + outputs.logits.square().mean()
        return outputs


def mean_of_rows(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="none").mean()


def bert(cls, **config):
    return cls(BertConfig(**BERT, **config))


def gpt2():
    sizes = dict(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))


def t5():
    sizes = dict(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))


def resnet():
    sizes = dict(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(num_labels=3, **sizes))


def vit():
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=3, **sizes))


def train(cls, make_model, dataset, output_dir, kwargs=None, **config):
    torch.manual_seed(0)
    args = TrainingArguments(
        **{
            "output_dir": str(output_dir),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "num_train_epochs": 1,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": cls is Trainer,
            **config,
        }
    )
    trainer = cls(make_model(), args, train_dataset=dataset, eval_dataset=dataset, **(kwargs or {}))
    trainer.train()
    return trainer


def rows_of_programs(trainer):
    """Rows of the batches that programs were compiled for, in training and in evaluation."""
    programs = trainer.watch.programs
    return tuple(
        [shape[0] for kind, shape in programs if kind == wanted] for wanted in ("training step", "evaluation step")
    )


@pytest.fixture
def trained(xla, tmp_path, same_logs):
    """Trains on XLA, checks every logged number against upstream's trainer, and gives the rows of each program."""

    def check(make_model, dataset, trainer=TPUTrainer, reference=Trainer, **settings):
        ours = train(trainer, make_model, dataset, tmp_path / "ours", **settings)
        stock = train(reference, make_model, dataset, tmp_path / "stock", **settings)
        same_logs(ours, stock)
        assert all(torch.isfinite(value).all() for value in ours.model.state_dict().values())
        assert ours.watch.recompiles == 0
        return rows_of_programs(ours)

    return check


COMPLETED = ([8], [8])
OWN_SHAPE = ([8, 1], [8, 1])

ALIKE = {
    "causal": (gpt2, {"labels": same_tokens}),
    "masked": (lambda: bert(BertForMaskedLM), {"labels": same_tokens}),
    "per token": (
        lambda: bert(BertForTokenClassification, num_labels=3),
        {"labels": lambda row: [token % 3 for token in row["input_ids"]]},
    ),
    "seq2seq": (
        t5,
        {"labels": lambda row: row["input_ids"][:5]},
    ),
    "classes": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        {"labels": lambda row: RNG.randrange(3)},
    ),
}

NOT_ALIKE = {
    "answers": (
        lambda: bert(BertForQuestionAnswering),
        {"start_positions": lambda row: RNG.randrange(LENGTH), "end_positions": lambda row: RNG.randrange(LENGTH)},
        "the loss of BertForQuestionAnswering counts every row and column",
    ),
    "regression": (
        lambda: bert(BertForSequenceClassification, num_labels=1),
        {"labels": lambda row: RNG.random()},
        "no value of `labels` (float32)",
    ),
    "several classes": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        {"labels": lambda row: [float(RNG.random() > 0.5) for _ in range(3)]},
        "no value of `labels` (float32)",
    ),
    "other key": (
        SquaredError,
        {"y": lambda row: [RNG.random() for _ in range(4)]},
        "SquaredError, a custom module",
    ),
    "contrastive": (Contrastive, {}, "Contrastive, a custom module"),
    "pooled": (Pooled, {"labels": lambda row: RNG.randrange(4)}, "Pooled, a custom module"),
    "penalty": (lambda: bert(Penalised), {"labels": same_tokens}, "Penalised, a custom module"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in ("masked", "classes") else []) for case in ALIKE]
)
def test_rows_that_count_for_nothing_are_added(trained, case):
    make_model, targets = ALIKE[case]
    assert trained(make_model, texts(**targets)) == COMPLETED


@pytest.mark.ci
def test_a_label_smoother_leaves_out_the_rows_that_are_added(trained):
    make_model, targets = ALIKE["causal"]
    assert trained(make_model, texts(**targets), label_smoothing_factor=0.1) == COMPLETED


def said_of(messages, reason):
    """Checks that training and evaluation say once each that the last batch keeps its shape, and why."""
    said = [message for message in messages if "The last batch has 1 of 8 rows" in message]
    assert ["training graph" in message for message in said] == [True, False]
    assert all(reason in message and "dataloader_drop_last=True" in message for message in said)


# By default one of each kind.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.slow]
            if case in ("regression", "several classes", "contrastive", "pooled")
            else [pytest.mark.ci] * (case == "penalty"),
        )
        for case in NOT_ALIKE
    ],
)
def test_rows_that_would_count_are_not_added(trained, case, caplog):
    make_model, targets, reason = NOT_ALIKE[case]
    # With other targets, upstream evaluates only what it is told about.
    label_names = {"other key": ["y"], "contrastive": ["input_ids"]}.get(case)
    assert trained(make_model, texts(**targets), label_names=label_names, num_train_epochs=2) == OWN_SHAPE
    said_of(caplog.messages, reason)


@pytest.mark.ci
@pytest.mark.parametrize("case", ["answers", "classes"])
def test_rows_without_labels_are_predicted(xla, tmp_path, caplog, case):
    """Such data to predict is nobody's mistake. The rows of the last batch count in no loss, and are completed."""
    make_model, targets = {**ALIKE, **NOT_ALIKE}[case][:2]
    rows = texts(**targets).select(range(BATCH))
    # The bias of places has no gradient but what is lost in rounding.
    still = dict(learning_rate=0.0, eval_strategy="no")
    ours, stock = (train(cls, make_model, rows, tmp_path, **still) for cls in (TPUTrainer, Trainer))
    ours.predict(rows)
    caplog.clear()
    unlabelled = texts().select(range(BATCH + 1))
    found, right = (trainer.predict(unlabelled) for trainer in (ours, stock))
    for mine, upstreams in zip(found.predictions, right.predictions, strict=True):
        np.testing.assert_allclose(mine, upstreams, rtol=1e-4, atol=1e-5)
    assert caplog.messages == [] and ours.watch.recompiles == 0
    kinds = [(kind, shape[0]) for kind, shape in ours.watch.programs if kind.startswith("prediction")]
    assert kinds == [("prediction step", BATCH), ("prediction step without labels", BATCH)]


def test_columns_that_count_are_told_of_where_they_were_added(xla, tmp_path, caplog):
    make_model, targets, _ = NOT_ALIKE["answers"]
    rows = texts(**targets).select(range(BATCH))

    def with_pads(examples, columns):
        batch = default_data_collator([{**row, "attention_mask": [1] * 6 + [0] * (LENGTH - 6)} for row in examples])
        return {key: value[:, :columns] if value.ndim > 1 else value for key, value in batch.items()}

    for columns in (LENGTH, 8):
        caplog.clear()
        collate = {"data_collator": partial(with_pads, columns=columns)}
        train(TPUTrainer, make_model, rows, tmp_path, kwargs=collate, eval_strategy="no")
        line = "of BertForQuestionAnswering counts every row and column. Upstream's trainer computes the same for data of that"
        assert caplog.text.count(line) == (columns < LENGTH)
    caplog.clear()
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=BATCH, report_to="none")
    trainer = TPUTrainer(make_model(), args, data_collator=partial(with_pads, columns=8), eval_dataset=rows)
    predictions = trainer.predict(rows).predictions
    assert caplog.text.count(line) == 1 and [logits.shape for logits in predictions] == [(BATCH, 8)] * 2


def test_models_that_take_the_mean_over_tokens(trained):
    """The rows that complete the last batch have tokens, too: without one, the mean is 0 / 0."""
    sizes = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    config = ModernBertConfig(**sizes, num_labels=3, classifier_pooling="mean")
    targets = ALIKE["classes"][1]
    assert trained(lambda: ModernBertForSequenceClassification(config), texts(**targets)) == COMPLETED


@pytest.mark.parametrize("kwargs", [{}, {"processing_class": ViTImageProcessor()}], ids=["alone", "with a processor"])
def test_images(trained, kwargs):
    assert trained(vit, images(3), kwargs=kwargs) == COMPLETED


@pytest.mark.ci
def test_batch_normalisation_sees_the_rows_of_a_batch_together(trained, caplog):
    # Two rows, since upstream cannot normalise by one.
    assert trained(resnet, images(3).select(range(26))) == ([8, 2], [8])
    assert "BatchNorm2d takes the mean over the rows of a batch" in caplog.text


@pytest.mark.ci
def test_a_loss_of_the_callers(trained, caplog):
    make_model, targets = ALIKE["classes"]
    assert trained(make_model, texts(**targets), kwargs={"compute_loss_func": mean_of_rows}) == OWN_SHAPE
    said_of(caplog.messages, "compute_loss_func is user code")


def test_the_last_step_of_an_epoch_with_accumulation(trained):
    """33 rows are two optimizer steps of two batches, and one of a batch of one row."""
    make_model, targets, _ = NOT_ALIKE["pooled"]
    assert trained(make_model, texts(**targets), gradient_accumulation_steps=2, num_train_epochs=2) == OWN_SHAPE


@pytest.mark.slow
def test_chips_that_cannot_share_a_batch_compute_all_of_it(tmp_path):
    driver = Path(__file__).with_name("ragged_driver.py")
    environment = {**os.environ, "CPU_NUM_DEVICES": "8", "PJRT_DEVICE": "CPU"}
    done = forked.run([sys.executable, driver, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- Supervised fine-tuning ----


def drop_nothing(module, args, output):
    """A hook of the user's."""


@pytest.mark.ci
@pytest.mark.parametrize("hooked", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["plain", "hooked"])
def test_supervised_training_is_completed_unless_there_is_code_of_the_callers(runs, same_logs, hooked, caplog):
    """22 rows in batches of 4, and 10 rows to evaluate."""

    def model():
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        if hooked:
            model.model.layers[0].register_forward_hook(drop_nothing)
        return model

    config = dict(max_steps=-1, num_train_epochs=1, eval_strategy="epoch" if hooked else "no")
    ours = runs.ours(model(), **config)
    same_logs(ours, runs.stock(model(), **config))
    # Rows to evaluate on are of two declared lengths.
    training, evaluation = rows_of_programs(ours)
    assert (training, set(evaluation)) == (([4, 2], {4, 2}) if hooked else ([4], set()))
    reason = "graph: a user hook on model.layers.0 (test_ragged_batches.py, line "
    assert caplog.text.count(reason) == (2 if hooked else 0)


# ---- What stays an error, and what does not ----


def any_rows(rows):
    """Leaves out more rows of each batch than of the one before."""
    any_rows.count -= 1
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])[: any_rows.count]}


def test_a_collator_of_ever_other_rows_is_an_error(trained, tmp_path):
    any_rows.count = BATCH
    config = dict(kwargs={"data_collator": any_rows}, remove_unused_columns=False)
    with pytest.raises(ValueError, match=r"`input_ids` was \(7, 12\) .* is \(6, 12\) now"):
        train(TPUTrainer, Alone, texts(), tmp_path, **config)
