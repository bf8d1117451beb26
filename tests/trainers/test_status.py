"""What logs show of the time of steps, and that looking changes nothing."""

import pytest

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends.counters import Counters
from hf_tpu_ext.backends.xla import XLABackend
from hf_tpu_ext.hardware.topologies import find_chip
from hf_tpu_ext.report.phases import BESIDES_STEPS
from hf_tpu_ext.step.estimate import read_dimensions, step_flops


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def phases_of(entry):
    return {name.removeprefix("phase/"): value for name, value in entry.items() if name.startswith("phase/")}


def test_a_log_shows_phases_and_tokens(runs):
    trainer = runs.ours(
        max_steps=6,
        logging_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        # A number of rows that no other test has: programs are compiled once in a process.
        per_device_train_batch_size=3,
        per_device_eval_batch_size=3,
    )
    logs = logs_of(trainer)
    first, second, third = map(phases_of, logs)
    assert {"data", "trace", "device", "read", "compile"} <= first.keys() and "replay" not in first
    assert first["compile"] > 0
    # The evaluation after the first log, which compiled its program.
    assert {"data", "replay", "device", "read", "log", "eval", "compile"} <= second.keys()
    assert "eval" in third and "compile" not in third and "trace" not in third
    for entry in logs:
        in_steps = sum(seconds for name, seconds in phases_of(entry).items() if name not in BESIDES_STEPS)
        assert in_steps == pytest.approx(entry["step_time"], abs=1e-5)
        assert entry["padded_tokens_per_second"] > entry["tokens_per_second"] > 0
        assert "mfu" not in entry, "the peak of a CPU is not known"
        assert entry["peak_memory_gib"] > 0
    assert not any(
        name.startswith("phase/") for entry in trainer.state.log_history if "eval_loss" in entry for name in entry
    )
    # Counted on the host as on the device.
    ((shape, count),) = trainer.status.batches.items()
    assert count.tokens == trainer.state.log_history[-1].get("num_tokens", logs[-1]["num_tokens"])
    assert count.batches == 12 and count.padded_tokens == 12 * shape[0] * shape[1]
    assert trainer.status.step_times["total"].total() == 6


def test_steps_that_are_traced(runs):
    trainer = runs.ours(config_cls=TPUSFTConfig, step_replay=False, max_steps=4, logging_steps=2)
    assert all("trace" in phases_of(entry) and "replay" not in phases_of(entry) for entry in logs_of(trainer))


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


def test_utilization_where_the_chip_is_known(runs, monkeypatch):
    chip = find_chip("TPU v5e")
    monkeypatch.setattr(XLABackend, "chip", chip)
    for lora in (None, {}):
        trainer = runs.ours(max_steps=3, logging_steps=3, lora=lora)
        (shape,) = trainer.status.batches
        trained = None
        if lora is not None:
            trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        flops = step_flops(read_dimensions(trainer.model.config), shape, trained)
        (entry,) = logs_of(trainer)
        expected = flops / entry["step_time"] / (chip.flops_per_second * trainer.backend.num_chips)
        assert entry["mfu"] == pytest.approx(expected, abs=1e-4)


def test_eager_cpu(runs):
    from hf_tpu_ext.backends import select_backend

    try:
        trainer = runs.ours(
            config_cls=TPUSFTConfig, backend="cpu", max_steps=4, logging_steps=2, gradient_accumulation_steps=2
        )
    finally:
        select_backend("xla")
    for entry in logs_of(trainer):
        assert {"data", "step", "read"} <= phases_of(entry).keys()
        assert sum(phases_of(entry).values()) == pytest.approx(entry["step_time"], abs=1e-5)
    (count,) = trainer.status.batches.values()
    assert count.batches == 8 and count.tokens == logs_of(trainer)[-1]["num_tokens"] < count.padded_tokens


def test_it_is_in_reports(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs.ours(max_steps=2, report_to="tensorboard")
    events = EventAccumulator(str(next(runs.output_dir.glob("**/events.out.*")).parent))
    events.Reload()
    assert {"train/tokens_per_second", "train/step_time", "train/phase/data"} <= set(events.Tags()["scalars"])


def test_looking_changes_nothing(runs, same_logs):
    spent, trainers = [], []
    for watched in (True, False):
        config = dict(step_status=watched, run_report=watched, max_steps=6, logging_steps=3)
        trainer = runs.ours(config_cls=TPUSFTConfig, train=False, **config)
        before = trainer.backend.counters()
        trainer.train()
        counted = trainer.backend.counters() - before
        spent.append(Counters(executions=counted.executions, reads=counted.reads, replays=counted.replays))
        trainers.append(trainer)
    assert spent[0] == spent[1]
    assert trainers[1].status is None
    assert not any(name.startswith(("phase/", "step_time", "tokens_")) for name in logs_of(trainers[1])[0])
    same_logs(*trainers)
