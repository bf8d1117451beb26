"""One object begins and ends each step, and everybody else finds it ended."""

import re
from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback
from trl import SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.errors import UserError


class ReadsAtTheEnd(TrainerCallback):
    """Reads a weight at the end of each step. Of a step that had not ended, that would execute a graph of its own."""

    def __init__(self, backend):
        self.backend = backend
        self.executions = []
        self.moved = []
        self._before = None

    def on_step_begin(self, args, state, control, model, **kwargs):
        self._count()
        self._weight = next(model.parameters()).detach().cpu()

    def on_step_end(self, args, state, control, model, **kwargs):
        self.moved.append(not next(model.parameters()).detach().cpu().equal(self._weight))

    def on_train_end(self, args, state, control, **kwargs):
        self._count()

    def _count(self):
        self.backend.wait()
        before, self._before = self._before, self.backend.counters().executions
        if before is not None:
            self.executions.append(self._before - before)


@pytest.mark.ci
@pytest.mark.parametrize("first", [False, True], ids=["added", "put first"])
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_callbacks_find_a_step_that_has_ended(runs, accumulation, first):
    """Traced and replayed, with the update done."""
    trainer = runs.ours(train=False, gradient_accumulation_steps=accumulation, max_steps=6, warmup_steps=0)
    callback = ReadsAtTheEnd(trainer.backend)
    trainer.add_callback(callback)
    if first:
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(1, callbacks.pop())
    before = trainer.backend.counters().replays
    trainer.train()
    assert callback.executions == [accumulation] * 6
    assert callback.moved == [True] * 6
    assert trainer.backend.counters().replays > before
    # And nothing of it is left on the model.
    assert trainer.steps.compiled is None and all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_run_that_fails_in_a_step_leaves_nothing(runs):
    class Fails(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("on purpose")

    trainer = runs.ours(train=False, gradient_accumulation_steps=2, max_steps=6)
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    assert trainer.steps.compiled is None and all(parameter.grad is None for parameter in trainer.model.parameters())
    trainer.pop_callback(Fails)
    assert trainer.train().global_step == 6


@pytest.mark.ci
def test_steps_are_replayed_after_more_is_trained(runs):
    """The gradients of what was frozen before are there when the next step is traced."""

    class Thaws(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            if state.global_step == 2:
                model.requires_grad_(True)

        def on_step_end(self, args, state, control, **kwargs):
            self.why_traced = trainer.steps.compiled.why_traced

    trainer = runs.ours(train=False, gradient_accumulation_steps=2, max_steps=5)
    trainer.model.model.layers[0].requires_grad_(False)
    trainer.add_callback(thaws := Thaws())
    trainer.train()
    assert thaws.why_traced is None


# ---- Code of the user's between two micro-steps ----


def gradients_of(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


class ScalesBetween(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_substep_end(self, args, state, control, model, **kwargs):
        self.seen.append(sum(parameter.grad.cpu().double().norm().item() for parameter in gradients_of(model)))
        for parameter in gradients_of(model):
            parameter.grad.mul_(0.5)


class FreezesBetween(TrainerCallback):
    def on_substep_end(self, args, state, control, model, **kwargs):
        if state.global_step == 4:
            model.model.layers[0].requires_grad_(False)


def clips_each_micro_step(upstream):
    class Clips(upstream):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            for parameter in gradients_of(self.model):
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            return loss

    return Clips


@pytest.mark.parametrize(
    "what",
    [
        *(pytest.param(what, marks=pytest.mark.slow) for what in ("a callback", "a callback that freezes")),
        pytest.param("an override", marks=pytest.mark.ci),
    ],
)
def test_gradients_between_micro_steps_are_the_users_to_change(runs, same_logs, what):
    """Silently they were not there: `parameter.grad` was `None`."""
    trainers = []
    callbacks = {"a callback": ScalesBetween, "a callback that freezes": FreezesBetween}
    for upstream in (runs.ours, runs.stock):
        kwargs = {"callbacks": [callbacks[what]()]} if what in callbacks else {}
        config = {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}
        if upstream == runs.ours:
            from hf_tpu_ext import TPUSFTTrainer

            cls = TPUSFTTrainer if what in callbacks else clips_each_micro_step(TPUSFTTrainer)
            trainer = runs.ours(cls=cls, kwargs=kwargs, **config)
        else:
            cls = SFTTrainer if what in callbacks else clips_each_micro_step(SFTTrainer)
            trainer = runs.trainer(cls, runs.config(use_cpu=True, **config), **kwargs)
            trainer.train()
        trainers.append(trainer)
    same_logs(*trainers)
    if what == "a callback":
        ours, theirs = (
            next(one.seen for one in trainer.callback_handler.callbacks if isinstance(one, ScalesBetween))
            for trainer in trainers
        )
        assert ours == pytest.approx(theirs, rel=1e-4) and min(ours) > 0


class Rising(TPUSFTTrainer):
    """As CONTRIBUTING.md has it of a loss with a number that differs from step to step."""

    def step_data(self):
        return {**super().step_data(), "weight": torch.tensor(1.0 + self.state.global_step)}

    def evaluation_data(self):
        return {**super().evaluation_data(), "weight": self.step_data()["weight"]}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * self.numbers_of_loss()["weight"]
        return (loss, outputs) if return_outputs else loss


@pytest.mark.ci
@pytest.mark.parametrize("use_cpu", [False, True])
def test_a_number_of_a_loss_is_that_of_its_step_and_evaluation_on_any_device(runs, monkeypatch, use_cpu):
    config = dict(config_cls=TPUSFTConfig, cls=Rising, learning_rate=0.0, warmup_steps=0, step_replay=True)
    config |= dict(use_cpu=use_cpu, eval_strategy="steps", eval_steps=2, max_steps=4)
    trainer = runs.ours(**config, train=False)
    batches, sent = [], []
    if not use_cpu:
        monkeypatch.setattr(trainer.backend.processes, "note_sent", lambda data: sent.append(len(data)))
        send = trainer.send_batch
        monkeypatch.setattr(trainer, "send_batch", lambda *args: batches.append(len(sent)) or send(*args))
    trainer.train()
    # Two steps, then an evaluation: a batch of it goes to the device with its number, in one transfer.
    assert use_cpu or {after - before for before, after in pairwise(batches[2:5])} == {1}
    plain = runs.ours(use_cpu=True, eval_strategy="steps", eval_steps=2, max_steps=4, learning_rate=0.0)
    for ours, theirs in zip(trainer.state.log_history, plain.state.log_history, strict=True):
        for name in {"loss", "eval_loss"} & ours.keys():
            # An evaluation comes after its step.
            weight = ours["step"] + (name == "eval_loss")
            assert ours[name] == pytest.approx(theirs[name] * weight, rel=1e-5)
    assert use_cpu or trainer.steps.why_traced is None


@pytest.mark.parametrize("use_cpu", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_number_of_a_loss_outside_of_a_run_is_that_of_the_steps_done(runs, use_cpu):
    """Whether the run has replayed its steps, and with numbers that upstream sets when it begins."""
    config = dict(
        config_cls=TPUSFTConfig, cls=Rising, learning_rate=0.0, warmup_steps=0, step_replay=True, max_steps=3
    )
    trainer = runs.ours(**config, use_cpu=use_cpu, gradient_accumulation_steps=2, eval_strategy="epoch", train=False)
    batch = next(iter(trainer.get_eval_dataloader()))

    def losses():
        found = [trainer.evaluate()["eval_loss"]]
        for training in (True, False):
            trainer.model.train(training)
            inputs = trainer._prepare_inputs(dict(batch))
            found.append(trainer.compute_loss(trainer.model, inputs).item())
        return found

    before = losses()
    trainer.train()
    assert losses() == pytest.approx([4 * loss for loss in before], rel=1e-5)


def test_a_number_that_evaluation_data_lacks_is_told_with_the_fix(runs):
    class Lacks(Rising):
        def evaluation_data(self):
            return super(Rising, self).evaluation_data()

    trainer = runs.ours(config_cls=TPUSFTConfig, cls=Lacks, use_cpu=True, eval_strategy="epoch", train=False)
    with pytest.raises(UserError) as error:
        trainer.evaluate()
    fix = re.search(r"evaluation_data of your trainer .* return (\{.*\})\.$", str(error.value)).group(1)

    class Returns(Lacks):
        def evaluation_data(self):
            return eval(
                fix.replace("super()", "super(Returns, self)"),
                {"Returns": Returns, "self": self, "torch": torch, "value": 2.0},
            )

    fixed = runs.ours(config_cls=TPUSFTConfig, cls=Returns, use_cpu=True, eval_strategy="epoch", train=False)
    assert fixed.evaluate()["eval_loss"] > 0
