"""One program per step, one execution per micro-step, no reads between logs: counted, not timed."""

import operator
import os
from itertools import pairwise

import pytest
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig


class CountPerStep(TrainerCallback):
    """Notes what the runtime did between the beginnings of two optimizer steps, with all work finished at each."""

    # No code of the user's, with which torch_tpu compiles no step whole.
    __module__ = "hf_tpu_ext.tests"

    def __init__(self, backend):
        self.backend = backend
        self.steps = []
        self._at_begin = None

    def on_step_begin(self, args, state, control, **kwargs):
        self.backend.wait()
        now = self.backend.counters()
        if self._at_begin is not None:
            self.steps.append(now - self._at_begin)
        self._at_begin = now

    def on_train_end(self, args, state, control, **kwargs):
        self.on_step_begin(args, state, control)


def counted_alone(backend, steps):
    """
    Places of steps whose executions are those of their own programs: all, and with torch_tpu those after the third that compile
    nothing. What compiles there runs operators, which are programs, too.
    """
    places = range(len(steps))
    return [place for place in places if place > 2 and not steps[place].compiles] if on_torch_tpu(backend) else places


def on_torch_tpu(backend):
    return backend.compiles_functions


def train_and_count(runs, **config):
    kwargs = config.pop("kwargs", {})
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, kwargs=kwargs, **config)
    counter = CountPerStep(trainer.backend)
    trainer.add_callback(counter)
    trainer.train()
    return trainer, counter.steps


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), {}], ids=["full", "lora"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_executions_are_micro_steps_and_nothing_is_read_between_logs(runs, accumulation, lora):
    """From a learning rate of 0 up and down to 0 again, over data of varying length."""
    trainer, steps = train_and_count(
        runs, lora=lora, gradient_accumulation_steps=accumulation, max_steps=8, logging_steps=100
    )
    learning_rates = [trainer.lr_scheduler.lr_lambdas[0](step) for step in range(9)]
    assert learning_rates[0] == 0 and learning_rates[-1] == 0
    # An epoch has 6 batches: accumulated by 4, its second step has the 2 that are left.
    micro_steps = [1] * 8 if accumulation == 1 else [4, 2] * 4
    assert [step.executions for step in steps] == micro_steps
    # The shorter last step of an epoch is no other program. Of each kind the first two are traced.
    assert sum(step.replays for step in steps) == sum(micro_steps) - (2 if accumulation == 1 else 4)
    assert [step.reads for step in steps[:-1]] == [0] * 7
    assert [step.compiles for step in steps[1:]] == [0] * 7
    assert [step.fallbacks for step in steps] == [0] * 8
    expected = {"training step"} | ({"micro-step"} if accumulation > 1 else set())
    assert {kind for kind, _ in trainer.watch.programs} == expected
    assert len({shape for _, shape in trainer.watch.programs}) == 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_and_its_numbers_are_one_transfer(runs, monkeypatch, accumulation):
    """Those of the optimizer among them."""
    trainer = runs.ours(
        train=False,
        config_cls=TPUSFTConfig,
        gradient_accumulation_steps=accumulation,
        max_steps=6,
        num_train_epochs=10,
        logging_steps=100,
    )
    transfers, per_step = [], []

    class AtEachStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            per_step.append(len(transfers))

    trainer.add_callback(AtEachStep())
    monkeypatch.setattr(trainer.backend.processes, "note_sent", lambda data: transfers.append(len(data)))
    trainer.train()
    replayed = [after - before for before, after in pairwise(per_step[3:])]
    assert replayed == [accumulation] * 2


def test_a_log_is_one_read(runs):
    _, steps = train_and_count(runs, max_steps=7, logging_steps=3)
    assert [step.reads for step in steps[:-1]] == [0, 0, 1, 0, 0, 1]


def test_buckets_compile_one_program_each(runs, rows):
    trainer, steps = train_and_count(
        runs,
        length_buckets=[16, 24, 32, 48],
        per_device_train_batch_size=2,
        num_train_epochs=2,
        max_steps=-1,
        logging_steps=100,
        kwargs={"train_dataset": rows(31)},
    )
    shapes = {shape for _, shape in trainer.watch.programs}
    assert 1 < len(shapes) <= 4 and all(rows == 2 and length in (16, 24, 32, 48) for rows, length in shapes)
    assert sum(step.compiles for step in steps) <= len(shapes)
    assert trainer.watch.recompiles == 0
    assert {step.executions for step in steps} == {1}


@pytest.mark.ci
def test_number_of_buckets_is_chosen_from_the_data(runs, rows, same_logs):
    kwargs = {"train_dataset": rows(40)}
    ours = runs.ours(config_cls=TPUSFTConfig, length_buckets=4, max_steps=10, kwargs=kwargs)
    assert 2 <= len(ours.lengths) <= 5 and ours.lengths[-1] == 48
    same_logs(ours, runs.stock(max_steps=10, kwargs=kwargs))


def test_evaluation_saving_and_epochs_compile_nothing_after_the_first(runs):
    """22 rows in batches of 4: the last batch of each epoch, and of each evaluation, has 2."""
    trainer, steps = train_and_count(
        runs,
        num_train_epochs=3,
        max_steps=-1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=5,
        logging_steps=3,
    )
    assert trainer.state.global_step == 18
    assert sum(step.compiles for step in steps[4:]) == 0
    assert trainer.watch.recompiles == 0
    assert [kind for kind, _ in trainer.watch.programs].count("training step") == 1


def test_dropout_and_checkpointing_do_not_recompile(runs):
    trainer, steps = train_and_count(runs, lora={"lora_dropout": 0.2}, max_steps=5, gradient_accumulation_steps=2)
    assert [step.compiles for step in steps[1:]] == [0] * 4
    assert [step.executions for step in steps] == [2] * 5


@pytest.mark.skipif("CPU_NUM_DEVICES" in os.environ, reason="gradients of several chips wait in tensors of their own")
def test_gradients_persist_only_with_accumulation(runs):
    """Their sums are the same tensors in all steps, and without accumulation they live inside the one program."""

    class Gradients(TrainerCallback):
        def __init__(self):
            self.kept = []

        def on_step_end(self, args, state, control, model, **kwargs):
            assert all(parameter.grad is None for parameter in model.parameters())
            self.kept.append(self.trainer.steps.gradients.tensors)

    for accumulation in (1, 2):
        callback = Gradients()
        callback.trainer = runs.ours(train=False, max_steps=3, gradient_accumulation_steps=accumulation)
        callback.trainer.add_callback(callback)
        callback.trainer.train()
        assert [len(kept) for kept in callback.kept] == [len(callback.kept[0])] * 3
        assert bool(callback.kept[0]) == (accumulation == 2)
        assert all(map(operator.is_, callback.kept[0], callback.kept[2]))


def test_parameters_and_moments_are_updated_in_place(runs):
    """The compiled step donates their buffers: as many inputs are aliased to outputs as there are such tensors."""
    import torch_xla.debug.metrics as met

    # Earlier tests have left theirs.
    earlier = met.metric_data("InputOutputAliasCount")
    trainer = runs.ours(max_steps=3, lr_scheduler_type="constant", per_device_train_batch_size=7)
    count, _, samples = met.metric_data("InputOutputAliasCount")
    count -= earlier[0] if earlier else 0
    assert count
    assert max(int(aliased) for _, aliased in samples[-count:]) >= 3 * len(list(trainer.model.parameters()))


@pytest.mark.ci
def test_a_run_with_all_that_reads_by_right_is_silent(runs, rows, caplog):
    """Buckets, accumulation, logs, evaluation with logits, checkpoints, answers before and after."""
    trainer = runs.ours(
        config_cls=TPUSFTConfig,
        show_samples=1,
        length_buckets=[24, 48],
        gradient_accumulation_steps=2,
        max_steps=9,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        lora={"lora_dropout": 0.1},
        kwargs={"train_dataset": rows(40), "compute_metrics": lambda prediction: {"one": 1.0}},
    )
    assert not any(event.cause for event in trainer.watch.events)
    assert trainer.watch.describe() is None
    assert trainer.sync_monitor.syncs == {} and trainer.sync_monitor._searches == 0
    assert not [record for record in caplog.records if record.name.startswith("hf_tpu_ext.watch.")]
    assert trainer.backend.counters().replays
