"""An evaluation whose batches are replayed is, bit for bit, the one whose batches are traced."""

import numpy as np
import pytest
import torch
from preference import Case, trainer_for
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer


BATCHES = 3


@pytest.fixture
def make(runs, rows):
    """Makes a trainer that evaluates 10 rows of one length in 3 batches, the last of which is ragged."""

    def trainer(step_replay=None, **config):
        torch.manual_seed(0)
        config.setdefault("length_buckets", [48])
        return runs.ours(train=False, config_cls=TPUSFTConfig, step_replay=step_replay, **config)

    return trainer


def numbers(metrics):
    times = ("runtime", "per_second", "preparation_time")
    return {key: value for key, value in metrics.items() if not any(word in key for word in times)}


def spent(trainer, evaluate):
    before = trainer.backend.counters()
    result = evaluate()
    return result, trainer.backend.counters() - before


def said(caplog):
    return [record.message for record in caplog.records if "Replay of evaluation is off" in record.message]


def test_each_shape_is_traced_twice_whatever_evaluates(make, caplog):
    replayed, traced = make(), make(step_replay=False)
    expected = numbers(traced.evaluate())
    for traces in (2, 0):
        metrics, counted = spent(replayed, replayed.evaluate)
        assert numbers(metrics) == expected
        assert (counted.replays, counted.executions) == (BATCHES - traces, BATCHES)
        assert counted.reads == 1
    assert counted.compiles == 0
    assert said(caplog) == []


def test_predictions(make):
    kwargs = {"compute_metrics": lambda prediction: {"rows": float(len(prediction.label_ids))}}
    replayed, traced = make(kwargs=kwargs), make(step_replay=False, kwargs=kwargs)
    # First: a warning, in the first of a process, is a change in the file that warns.
    expected = traced.predict(traced.eval_dataset)
    for traces in (2, 0):
        output, counted = spent(replayed, lambda: replayed.predict(replayed.eval_dataset))
        assert np.array_equal(output.predictions, expected.predictions)
        assert np.array_equal(output.label_ids, expected.label_ids)
        assert numbers(output.metrics) == numbers(expected.metrics)
        assert (counted.replays, counted.executions) == (BATCHES - traces, BATCHES)
    # Both ways of evaluating, in turns, go on.
    kwargs["compute_metrics"] = replayed.compute_metrics = None
    replayed.evaluate()
    _, counted = spent(replayed, replayed.evaluate)
    assert counted.replays == BATCHES


def test_weights_that_have_changed_are_those_that_count(make):
    replayed, traced = make(), make(step_replay=False)
    for change in (
        lambda weight: weight.mul_(1.5),
        lambda weight: weight.copy_(torch.flip(weight, (0,))),
        lambda weight: setattr(weight, "data", weight * 0.5),
    ):
        for trainer in (replayed, traced):
            trainer.evaluate()
            with torch.no_grad():
                change(trainer.model.model.norm.weight)
        metrics, counted = spent(replayed, replayed.evaluate)
        assert counted.replays == BATCHES
        assert numbers(metrics) == numbers(traced.evaluate())


def test_what_python_reads_is_compared(make):
    replayed, traced = make(), make(step_replay=False)
    before = numbers(replayed.evaluate())
    for trainer in (replayed, traced):
        trainer.model.model.layers[0].self_attn.scaling *= 3
    metrics, counted = spent(replayed, replayed.evaluate)
    assert numbers(metrics) == numbers(traced.evaluate()) != before
    assert counted.replays == BATCHES - 2


class ScalesTheLoss(TPUSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 2


@pytest.mark.parametrize("way", ["loss", "hook", "predictions"])
def test_code_of_the_user_has_batches_traced_and_one_line_says_so(make, caplog, way):
    trainer = make(
        cls=ScalesTheLoss if way == "loss" else None,
        kwargs={
            "compute_metrics": lambda prediction: {},
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        }
        if way == "predictions"
        else {},
    )
    if way == "hook":
        trainer.model.model.norm.register_forward_hook(lambda *args: None)
    for _ in range(2):
        _, counted = spent(trainer, trainer.evaluate)
        assert counted.replays == 0
    (line,) = said(caplog)
    named = {"loss": "ScalesTheLoss overrides compute_loss", "hook": "a user hook on model.norm"}
    assert named.get(way, "preprocess_logits_for_metrics is user code") in line


def test_own_code_that_is_said_to_do_the_same_is_replayed(make):
    kwargs = {
        "compute_metrics": lambda prediction: {"sum": float(prediction.predictions.sum())},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    replayed, traced = make(step_replay=True, kwargs=kwargs), make(step_replay=False, kwargs=kwargs)
    for _ in range(2):
        # A warning, in the first of a process, is a change in the file that warns.
        replayed.evaluate()
    metrics, counted = spent(replayed, replayed.evaluate)
    assert numbers(metrics) == numbers(traced.evaluate())
    assert counted.replays == BATCHES


class Halves(TrainerCallback):
    """Halves a weight after each batch."""

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.model.norm.weight.mul_(0.5)


@pytest.mark.slow
def test_callbacks_between_batches_and_steps(make):
    """Training and evaluation in turns, with a callback that changes weights within an evaluation."""
    logs = []
    for replay in (None, False):
        trainer = make(
            step_replay=replay,
            max_steps=6,
            eval_strategy="steps",
            eval_steps=2,
            kwargs={"callbacks": [Halves()]},
        )
        _, counted = spent(trainer, trainer.train)
        logs.append([numbers(log) for log in trainer.state.log_history if "eval_loss" in log])
        assert (counted.replays > 6) == (replay is None)
    assert logs[0] == logs[1]


def test_a_batch_that_is_predicted_by_hand_leaves_the_model_as_it_is(make):
    trainer = make()
    trainer.evaluate()
    trainer.model.train()
    batch = next(iter(trainer.get_eval_dataloader()))
    _, counted = spent(trainer, lambda: trainer.prediction_step(trainer.model, batch, False))
    assert trainer.model.training
    assert counted.replays == 0


@pytest.mark.parametrize(
    "kind", [pytest.param("dpo", marks=pytest.mark.ci), pytest.param("reward", marks=pytest.mark.slow)]
)
def test_preferences(xla, tmp_path, kind):
    evaluations = []
    for replay in (None, False):
        trainer = trainer_for(Case(kind, {"step_replay": replay}, evaluates=True), tmp_path, ours=True)
        evaluations.append([numbers(trainer.evaluate()) for _ in range(3)])
        _, counted = spent(trainer, trainer.evaluate)
        assert counted.replays == (0 if replay is False else counted.executions)
    assert evaluations[0] == evaluations[1]
