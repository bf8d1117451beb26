"""What logs show of the time of steps, and that looking changes nothing."""

from collections import Counter

import pytest
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends.insight import Counters
from hf_tpu_ext.backends.xla.backend import XLABackend
from hf_tpu_ext.hardware.topologies import find_chip
from hf_tpu_ext.layers.flops import step_flops
from hf_tpu_ext.report.metrics import BESIDES_STEPS


SPEED = {"step_time", "tokens_per_second", "padded_tokens_per_second", "peak_memory_gb"}


class Shown(TrainerCallback):
    """What a log shows, and the seconds of each phase since the log before."""

    def __init__(self):
        self.logs, self.trainer, self._until = [], None, Counter()

    def on_log(self, args, state, control, logs, **kwargs):
        status = self.trainer.status
        now = Counter() if status is None else status.clock.copy_seconds()
        self.logs.append({**logs, "phases": now - self._until})
        self._until = now

    @property
    def of_steps(self):
        return [entry for entry in self.logs if "loss" in entry]


@pytest.fixture
def shown(runs):
    """Trains as `runs.ours`, and gives the trainer with what its logs have shown."""

    def train(train=True, kwargs=None, **config):
        logs = Shown()
        trainer = runs.ours(train=False, kwargs={**(kwargs or {}), "callbacks": [logs]}, **config)
        logs.trainer = trainer
        if train:
            trainer.train()
        return trainer, logs

    return train


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_log_shows_speed_and_the_last_one_phases(shown):
    trainer, logs = shown(
        max_steps=6,
        logging_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        # A number of rows that no other test has: programs are compiled once in a process.
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
    )
    first, second, third = (entry["phases"] for entry in logs.of_steps)
    assert {"data", "trace", "device", "read", "compile"} <= first.keys() and "replay" not in first
    assert first["compile"] > 0
    assert {"data", "replay", "device", "read", "log"} <= second.keys()
    assert "compile" not in third and "trace" not in third
    for entry in logs.of_steps:
        assert SPEED <= entry.keys() and entry["padded_tokens_per_second"] > entry["tokens_per_second"] > 0
        assert "mfu" not in entry, "the peak of a CPU is not known"
        assert entry["step_time"] > 0 and entry["peak_memory_gb"] > 0
    *before, last = logs.logs
    assert not any(name.startswith("phase/") for entry in before for name in entry)
    phases = {name.removeprefix("phase/"): value for name, value in last.items() if name.startswith("phase/")}
    assert {"data", "trace", "replay", "device", "read", "log", "compile", "eval"} <= phases.keys()
    in_steps = sum(seconds for name, seconds in phases.items() if name not in BESIDES_STEPS)
    # And what came after the last step.
    assert in_steps >= 0.99 * sum(2 * entry["step_time"] for entry in logs.of_steps)
    # Counted on the host as on the device.
    ((shape, count),) = trainer.status.batches.items()
    assert count.tokens == trainer.state.log_history[-1].get("num_tokens", logs_of(trainer)[-1]["num_tokens"])
    assert count.batches == 12 and count.padded_tokens == 12 * shape[0] * shape[1]
    assert trainer.status.step_times["total"].total() == 6


def test_the_history_and_the_result_of_a_run_have_upstreams_keys(runs, shown):
    config = dict(max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2)
    trainer, logs = shown(train=False, **config)
    result, stock = trainer.train(), runs.stock(**config)
    assert [entry.keys() for entry in trainer.state.log_history] == [entry.keys() for entry in stock.state.log_history]
    assert result.metrics.keys() - {"epoch"} == stock.state.log_history[-1].keys() - {"epoch", "step", "num_tokens"}
    assert logs.logs[-1]["epoch"] == trainer.state.log_history[-1]["epoch"]


@pytest.mark.ci
def test_steps_that_are_traced(shown):
    _, logs = shown(config_cls=TPUSFTConfig, step_replay=False, max_steps=4, logging_steps=2)
    assert all("trace" in entry["phases"] and "replay" not in entry["phases"] for entry in logs.of_steps)


@pytest.mark.ci
def test_buckets_are_counted_by_shape(runs, rows):
    trainer = runs.ours(
        config_cls=TPUSFTConfig,
        length_buckets=[16, 48],
        per_device_train_batch_size=2,
        kwargs={"train_dataset": rows(31)},
        max_steps=12,
        logging_steps=6,
    )
    assert trainer.status.batches.keys() == {(2, 16), (2, 48)}
    assert sum(count.batches for count in trainer.status.batches.values()) == 12
    assert all(0 < count.tokens <= count.padded_tokens for count in trainer.status.batches.values())
    assert sum(count.tokens for count in trainer.status.batches.values()) == logs_of(trainer)[-1]["num_tokens"]


def test_utilization_where_the_chip_is_known(shown, monkeypatch):
    chip = find_chip("TPU v5e")
    monkeypatch.setattr(XLABackend, "chip", chip)
    for lora in (None, {}):
        trainer, logs = shown(max_steps=3, logging_steps=3, lora=lora)
        (shape,) = trainer.status.batches
        trained = None
        if lora is not None:
            trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        flops = step_flops(trainer.model.config, shape, trained)
        (entry,) = logs.of_steps
        expected = flops / entry["step_time"] / (chip.flops_per_second * trainer.backend.num_chips)
        assert entry["mfu"] == pytest.approx(expected, abs=1e-4)


def test_eager_cpu(shown):
    from hf_tpu_ext.backends import select_backend

    try:
        trainer, logs = shown(
            config_cls=TPUSFTConfig, backend="cpu", max_steps=4, logging_steps=2, gradient_accumulation_steps=2
        )
    finally:
        select_backend("xla")
    for entry in logs.of_steps:
        assert {"data", "step", "read"} <= entry["phases"].keys() and entry["step_time"] > 0
    (count,) = trainer.status.batches.values()
    assert count.batches == 8 and count.tokens == logs_of(trainer)[-1]["num_tokens"] < count.padded_tokens


def test_it_is_in_reports(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs.ours(max_steps=2, report_to="tensorboard")
    events = EventAccumulator(str(next(runs.output_dir.glob("**/events.out.*")).parent))
    events.Reload()
    assert {"train/tokens_per_second", "train/step_time", "train/phase/data"} <= set(events.Tags()["scalars"])


def test_looking_changes_nothing(shown, same_logs):
    spent, trainers, keys = [], [], []
    for watched in (True, False):
        config = dict(step_status=watched, run_report=watched, max_steps=6, logging_steps=3)
        trainer, logs = shown(config_cls=TPUSFTConfig, train=False, **config)
        before = trainer.backend.counters()
        trainer.train()
        counted = trainer.backend.counters() - before
        spent.append(Counters(executions=counted.executions, reads=counted.reads, replays=counted.replays))
        trainers.append(trainer)
        keys.append({name for entry in logs.logs for name in entry})
    assert spent[0] == spent[1]
    assert trainers[1].status is None
    assert all(name in SPEED or name.startswith("phase/") for name in keys[0] - keys[1]) and not keys[1] & SPEED
    same_logs(*trainers)


class LogsByItself(TrainerCallback):
    """As a user's on the first process alone, where others are not there to count with."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 2:
            self.trainer.log({"loss": 1.0})


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_speed_is_counted_by_the_logs_that_all_processes_make(runs, monkeypatch, backend):
    logs = LogsByItself()
    trainer = runs.ours(
        train=False,
        backend=backend,
        config_cls=TPUSFTConfig,
        max_steps=4,
        logging_steps=2,
        kwargs={"callbacks": [logs]},
    )
    logs.trainer, take_speed, counted = trainer, trainer.status.take_speed, []
    monkeypatch.setattr(
        trainer.status, "take_speed", lambda: counted.append(trainer.state.global_step) or take_speed()
    )
    trainer.train()
    assert counted == [2, 4]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
