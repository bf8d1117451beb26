"""Evaluation with metrics, predictions, and ragged last batches."""

import numpy as np
import pytest
from trl import SFTTrainer


def accuracy(prediction):
    labels = prediction.label_ids[:, 1:]
    return {
        "accuracy": (prediction.predictions[:, :-1] == labels)[labels != -100].mean().item(),
        "rows": float(len(labels)),
    }


def most_likely(logits, labels):
    return logits.argmax(-1)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
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


def test_logits_come_back_in_float32(runs):
    trainer = runs.ours(train=False, bf16=True, kwargs={"compute_metrics": lambda prediction: {}})
    predictions = trainer.predict(trainer.eval_dataset).predictions
    assert predictions.dtype == np.float32 and predictions.shape == (10, predictions.shape[1], 259)


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
    )
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)
