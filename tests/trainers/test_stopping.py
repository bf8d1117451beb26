"""A run that is told to stop at a known point of it, and goes on in another trainer, is the run that never was."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
import two_processes
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TrainingPreempted
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step
from hf_tpu_ext.trainers.checkpoint.verification import find_damage


BATCHES_PER_EPOCH = 6  # 22 rows in batches of 4
CONFIG = dict(
    max_steps=9,
    save_strategy="steps",
    save_steps=3,
    eval_strategy="steps",
    eval_steps=3,
    # Its order is drawn from the host's random numbers, and so is the seed of each loader.
    train_sampling_strategy="group_by_length",
    neftune_noise_alpha=5.0,
)


class StopAt(TrainerCallback):
    """Sends the process a signal where an event happens for the first time at or after a step."""

    def __init__(self, event, step):
        self.step = step
        self.sent_at = None
        setattr(self, event, self.send)

    def send(self, args, state, control, **kwargs):
        if self.sent_at is None and state.global_step >= self.step:
            self.sent_at = state.global_step
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture(params=["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def make(request, runs):
    """Makes trainers on a backend, for one directory."""

    def make(name, callbacks=(), cls=TPUSFTTrainer, **config):
        from hf_tpu_ext.backends import select_backend

        try:
            return runs.ours(
                train=False,
                cls=cls,
                config_cls=TPUSFTConfig,
                backend=request.param,
                output_dir=str(runs.output_dir / name),
                kwargs={"callbacks": list(callbacks)},
                **{**CONFIG, **config},
            )
        finally:
            select_backend("xla")

    return make


@pytest.fixture(scope="module")
def ended_runs():
    return {}


@pytest.fixture
def undisturb(make, ended_runs, request):
    """Trains without a signal: once for each configuration."""

    def train(callbacks=(), **config):
        key = repr((request.node.callspec.params["make"], callbacks, sorted(config.items())))
        if key not in ended_runs:
            ended_runs[key] = make("undisturbed", callbacks, **config)
            ended_runs[key].train()
        return ended_runs[key]

    return train


def stop_and_resume(make, callback, **config):
    """The trainer that ended the run, and what stopped the first one."""
    stopped = make("stopped", [callback], **config)
    with pytest.raises(TrainingPreempted) as preempted:
        stopped.train()
    handler = signal.getsignal(signal.SIGTERM)
    assert handler == signal.SIG_DFL
    resumed = make("stopped", **config)
    resumed.train(resume_from_checkpoint=True)
    return resumed, preempted.value


def assert_same(trainer, undisturbed, same_logs, without=lambda entry: False):
    """Weights and logs, without some entries of both."""
    fetch = undisturbed.backend.fetch
    torch.testing.assert_close(
        fetch(dict(trainer.model.state_dict())), fetch(dict(undisturbed.model.state_dict())), rtol=0, atol=0
    )
    # The closing summary is of the last call.
    logs = [
        SimpleNamespace(
            state=SimpleNamespace(log_history=[entry for entry in run.state.log_history[:-1] if not without(entry)])
        )
        for run in (trainer, undisturbed)
    ]
    same_logs(*logs, rel=0)


@pytest.mark.parametrize(
    ("event", "step", "stops_after"),
    [
        ("on_step_begin", 4, 5),
        pytest.param("on_optimizer_step", 4, 5, marks=pytest.mark.slow),
        pytest.param("on_step_end", 5, 5, marks=pytest.mark.slow),
        pytest.param("on_step_end", 6, 6, marks=pytest.mark.slow),
        pytest.param("on_log", 3, 3, marks=pytest.mark.slow),
        pytest.param("on_prediction_step", 3, 3, marks=pytest.mark.slow),
        pytest.param("on_prediction_step", 9, 9, marks=pytest.mark.slow),
        pytest.param("on_evaluate", 3, 3, marks=pytest.mark.slow),
        ("on_save", 3, 3),
        ("on_epoch_end", 6, 6),
        pytest.param("on_epoch_begin", 6, 7, marks=pytest.mark.slow),
        ("on_train_begin", 0, 1),
    ],
)
def test_stopped_at(make, undisturb, same_logs, event, step, stops_after):
    undisturbed = undisturb()
    resumed, stopped = stop_and_resume(make, StopAt(event, step))
    assert stopped.step == stops_after and stopped.checkpoint.endswith(f"stopped/checkpoint-{stops_after}")
    assert_same(resumed, undisturbed, same_logs)


@pytest.mark.ci
@pytest.mark.parametrize("make", ["xla"], indirect=True)
def test_stopped_in_an_evaluation_on_xla(make, undisturb, same_logs):
    test_stopped_at(make, undisturb, same_logs, "on_prediction_step", 3, 3)


def test_an_evaluation_that_predicts_is_cut_after_its_batch(make):
    """Although predictions are read for many batches at once."""
    trainer = make("stopped", per_device_eval_batch_size=1)
    trainer.compute_metrics = lambda prediction: {}
    collate, batches = trainer.data_collator, []

    def collate_and_stop(rows):
        if not trainer.model.training:
            batches.append(len(rows))
        if len(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
        return collate(rows)

    trainer.data_collator = collate_and_stop
    with pytest.raises(TrainingPreempted):
        trainer.train()
    assert 2 <= len(batches) <= 3 < len(trainer.eval_dataset)


def test_stopped_between_two_epochs_and_again_in_the_second(make, undisturb, same_logs):
    undisturbed = undisturb()
    with pytest.raises(TrainingPreempted):
        make("stopped", [StopAt("on_step_end", BATCHES_PER_EPOCH)]).train()
    with pytest.raises(TrainingPreempted):
        make("stopped", [StopAt("on_step_end", BATCHES_PER_EPOCH + 1)]).train(resume_from_checkpoint=True)
    resumed = make("stopped")
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed, same_logs)


@pytest.mark.parametrize(
    ("event", "step", "stops_after"),
    [
        pytest.param("on_step_end", 4, 4, marks=pytest.mark.slow),
        ("on_step_end", BATCHES_PER_EPOCH, BATCHES_PER_EPOCH),
        ("on_prediction_step", BATCHES_PER_EPOCH, BATCHES_PER_EPOCH),
        ("on_prediction_step", 9, 9),
    ],
)
def test_stopped_with_strategies_by_epoch(make, undisturb, same_logs, event, step, stops_after):
    """What is due at the end of an epoch is not done where the run was stopped, and not left out where an epoch ended."""
    config = dict(
        eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", num_train_epochs=2, max_steps=-1
    )
    if step == 9:
        config["max_steps"] = 9
    undisturbed = undisturb(**config)
    resumed, stopped = stop_and_resume(make, StopAt(event, step), **config)
    assert stopped.step == stops_after

    def counts_from_the_resume(entry):
        # The first log after a resume between two logs is of the steps since.
        return step == 4 and entry["step"] == BATCHES_PER_EPOCH and "eval_loss" not in entry

    assert_same(resumed, undisturbed, same_logs, without=counts_from_the_resume)


@pytest.mark.parametrize(
    ("event", "step", "config"),
    [("on_step_end", 4, dict(save_strategy="no")), ("on_save", 6, dict(save_only_model=True))],
    ids=["no-saves", "model-only"],
)
def test_what_it_takes_to_go_on_is_saved(make, undisturb, same_logs, event, step, config):
    undisturbed = undisturb(**config)
    resumed, stopped = stop_and_resume(make, StopAt(event, step), **config)
    assert stopped.step == step
    assert_same(resumed, undisturbed, same_logs)


class StopsInSave(TPUSFTTrainer):
    """Is told to stop in the middle of the first save."""

    saves = 0

    def _save_checkpoint(self, model, trial):
        self.saves += 1
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir):
        if self.saves == 1:
            signal.raise_signal(signal.SIGTERM)
        super()._save_rng_state(output_dir)


def test_a_save_that_is_under_way_is_finished_and_not_begun_anew(make):
    trainer = make("stopped", cls=StopsInSave, eval_strategy="no")
    with pytest.raises(TrainingPreempted) as stopped:
        trainer.train()
    assert (trainer.saves, stopped.value.step) == (1, 3)


def test_best_model_and_the_limit(make, undisturb, same_logs):
    """The checkpoint of a run that was stopped is not the best, and stays; the best of all is the same at the end."""
    config = dict(
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, save_total_limit=1
    )
    undisturbed = undisturb(**config)
    resumed, stopped = stop_and_resume(make, StopAt("on_prediction_step", 6), **config)
    assert stopped.step == 6
    assert_same(resumed, undisturbed, same_logs)
    best = [run.state.best_model_checkpoint.rpartition("/")[2] for run in (resumed, undisturbed)]
    assert best == ["checkpoint-3"] * 2


def test_best_is_found_by_the_evaluation_that_is_made_up_for(make, undisturb, same_logs):
    config = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1)
    undisturbed = undisturb(**config)
    resumed, _ = stop_and_resume(make, StopAt("on_prediction_step", 9), **config)
    assert_same(resumed, undisturbed, same_logs)
    assert resumed.state.best_model_checkpoint.endswith("stopped/checkpoint-9")
    state, expected = (
        json.loads(Path(run.state.best_model_checkpoint, "trainer_state.json").read_text())
        for run in (resumed, undisturbed)
    )
    assert state["best_metric"] == expected["best_metric"] and state["best_global_step"] == 9


def test_stopped_again_in_the_evaluation_that_is_made_up_for(make, undisturb, same_logs):
    undisturbed = undisturb()
    with pytest.raises(TrainingPreempted):
        make("stopped", [StopAt("on_prediction_step", 3)]).train()
    with pytest.raises(TrainingPreempted) as stopped:
        make("stopped", [StopAt("on_prediction_step", 3)]).train(resume_from_checkpoint=True)
    assert stopped.value.checkpoint.endswith("stopped/checkpoint-3")
    resumed = make("stopped")
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, undisturbed, same_logs)


def test_early_stopping_by_the_evaluation_that_is_made_up_for(make, undisturb, same_logs):
    config = dict(
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, save_total_limit=2
    )
    undisturbed = undisturb([EarlyStoppingCallback(1)], **config)
    assert undisturbed.state.global_step == 6
    with pytest.raises(TrainingPreempted):
        make("stopped", [EarlyStoppingCallback(1), StopAt("on_prediction_step", 6)], **config).train()
    resumed = make("stopped", [EarlyStoppingCallback(1)], **config)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert_same(resumed, undisturbed, same_logs)


def test_the_same_trainer_goes_on(make, undisturb, same_logs):
    """As in a notebook, after an interrupt."""
    undisturbed = undisturb()
    trainer = make("stopped", [StopAt("on_prediction_step", 3)])
    with pytest.raises(TrainingPreempted):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert_same(trainer, undisturbed, same_logs)


def test_lines_of_a_run_that_is_stopped(make, capfd):
    with pytest.raises(TrainingPreempted) as stopped:
        make("stopped", [StopAt("on_step_end", 4)]).train()
    out, err = capfd.readouterr()
    assert err.count("SIGTERM: saving after this step; a second one exits immediately.") == 1
    assert out.splitlines()[-1] == str(stopped.value)
    assert "after step 4" in out and "--resume_from_checkpoint true" in out


def start_two(*words):
    """Two processes of one run, with gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        forked.Popen(
            [sys.executable, two_processes.__file__, *map(str, words)],
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]


@pytest.mark.slow
def test_several_processes_are_counted_together(tiny_model, tmp_path):
    processes = start_two(tiny_model, tmp_path / "run", 2)
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert (
        "2 devices in 2 processes" in outputs[0]
        and "8 per device x 1 gradient accumulation step x 2 devices" in outputs[0]
    )
    assert "Training on" not in outputs[1]
    events = [json.loads(line) for line in (tmp_path / "run/run.jsonl").read_text().splitlines()]
    backend = next(event["backend"] for event in events if event["event"] == "begin")
    assert (backend["chips"], backend["processes"], backend["hosts"]) == (2, 2, 1)
    # 16 rows of 6 tokens, the end-of-sequence token among them, in 2 steps of 2 x 8 rows.
    ((_, (batches, tokens, padded)),) = next(event for event in events if event["event"] == "end")["batches"]
    assert (batches, tokens, padded) == (4, 2 * 16 * 6, 2 * 16 * 6)
    report = (tmp_path / "run/report.md").read_text()
    assert "on 2 devices of" in report and " in 2 processes, begun" in report


@pytest.mark.slow
def test_several_processes_that_are_all_told_to_stop(tiny_model, tmp_path):
    processes = start_two(tiny_model, tmp_path / "run")
    try:
        for process in processes:
            assert any(line == "training\n" for line in process.stdout)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(100) for process in processes] == [os.EX_TEMPFAIL] * 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    (checkpoint,) = checkpoints_by_step(tmp_path / "run").values()
    assert find_damage(checkpoint) is None
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= {path.name for path in checkpoint.iterdir()}


@pytest.mark.slow
def test_torchrun_that_is_told_to_stop_leaves_what_it_leaves_with_upstreams_trainer(tiny_model, tmp_path):
    left = {}
    for stock in "10":
        run = tmp_path / f"run-{stock}"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        launcher = subprocess.Popen(
            [*launch, two_processes.__file__, str(tiny_model), str(run)],
            # Else upstream takes the machine for one with a TPU.
            env={**os.environ, "STOCK": stock, "USE_TORCH_XLA": "0", "HF_TPU_EXT_BACKEND": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for _ in range(2):
                assert any(line == "training\n" for line in launcher.stdout)
            # Which it passes on to both.
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(100)
        finally:
            launcher.kill()
            launcher.communicate()
        (checkpoint,) = checkpoints_by_step(run).values()
        assert find_damage(checkpoint) is None
        left[stock] = {path.name for path in checkpoint.iterdir()}
    assert left["0"] - left["1"] == {"manifest.json", "run_state.json"} and left["1"] <= left["0"]


def test_upstreams_own_handler_gives_way(make, capfd):
    before, during = signal.getsignal(signal.SIGTERM), []

    class Handler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            during.append(signal.getsignal(signal.SIGTERM))

    config = dict(enable_jit_checkpoint=True, eval_strategy="no", save_strategy="no")
    trainer = make("jit", [Handler(), StopAt("on_step_end", 2)], max_steps=3, **config)
    (upstreams,) = [found for found in trainer.callback_handler.callbacks if isinstance(found, JITCheckpointCallback)]
    assert trainer.args.enable_jit_checkpoint
    assert signal.getsignal(signal.SIGTERM) == upstreams.jit_manager._sigterm_handler
    with pytest.raises(TrainingPreempted) as stopped:
        trainer.train()
    assert set(during) == {trainer.preemption._on_signal} and stopped.value.step == 2
    assert signal.getsignal(signal.SIGTERM) == before
    assert "enable_jit_checkpoint has no effect" in capfd.readouterr().out


def test_signals_do_what_they_did_before_once_the_last_step_is_done(make):
    before, during = signal.getsignal(signal.SIGTERM), {}

    class Handler(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            during["step"] = signal.getsignal(signal.SIGTERM)

        def on_train_end(self, args, state, control, **kwargs):
            during["end"] = signal.getsignal(signal.SIGTERM)

    trainer = make("ending", [Handler()], max_steps=1, eval_strategy="no", save_strategy="no")
    trainer.train()
    assert during == {"step": trainer.preemption._on_signal, "end": before}
