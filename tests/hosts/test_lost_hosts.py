"""Hosts that are told to stop, killed, or that have something else than the others."""

import json
import random
import re
import shutil
import signal
import time

import pytest
from pretended_slice import TWO, assert_same_log
from safetensors.torch import load_file

from hf_tpu_ext.backends.slice_hosts import EXIT_STATUS
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step


pytestmark = pytest.mark.slow

TIMES = 10
SILENCE = 10
LONG = dict(
    mesh="data=2,fsdp=2",
    max_steps=60,
    warmup_steps=3,
    save_strategy="steps",
    save_steps=5,
    save_total_limit=2,
    eval_strategy="steps",
    eval_steps=7,
    neftune_noise_alpha=5.0,
    train_sampling_strategy="group_by_length",
)


def wait_for_step(slice_, host, steps):
    """Wait until a host has ended so many steps since it was started; `False` where it ends before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = re.findall(r"^step (\d+)$", slice_.output(host), re.MULTILINE)
        if len(found) >= steps:
            return True
        if slice_.processes[host].poll() is not None:
            return False
        time.sleep(0.02)
    raise AssertionError(slice_.output(host)[-3000:])


@pytest.fixture(scope="module")
def undisturbed(start_slice, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    start_slice(TWO, {"run": {**LONG, "output_dir": str(directory)}}, "undisturbed").run()
    return directory / "checkpoint-60"


def same_end(directory, undisturbed):
    mine, other = (
        json.loads((path / "trainer_state.json").read_text())["log_history"]
        for path in (directory / "checkpoint-60", undisturbed)
    )
    measured = ("runtime", "per_second", "time", "phase/", "memory")
    assert_same_log(
        *(
            [{k: v for k, v in entry.items() if not any(m in k for m in measured)} for entry in log]
            for log in (mine, other)
        )
    )
    weights, others = (load_file(path / "model.safetensors") for path in (directory / "checkpoint-60", undisturbed))
    for name, weight in others.items():
        assert weights[name].equal(weight), name


def resumed(directory):
    return {"resume": True} if checkpoints_by_step(directory) else {}


def test_a_signal_to_any_host_stops_all_after_the_same_step(start_slice, undisturbed, tmp_path):
    rng = random.Random(0)
    for turn in range(TIMES):
        run = {"run": {**LONG, **resumed(tmp_path), "output_dir": str(tmp_path), "callbacks": ["tell"]}}
        slice_ = start_slice(TWO, run, f"stopped-{turn}")
        told = rng.randrange(2)
        assert wait_for_step(slice_, told, rng.randint(1, 4))
        time.sleep(rng.uniform(0, 0.3))
        slice_.processes[told].send_signal(signal.SIGTERM)
        assert slice_.wait(120) == [75, 75], slice_.output(0)[-2000:] + slice_.output(1)[-2000:]
        steps = [re.findall(r"^step (\d+)$", slice_.output(host), re.MULTILINE)[-1] for host in range(2)]
        assert steps[0] == steps[1] == str(max(checkpoints_by_step(tmp_path)))
        assert f"Stopped by SIGTERM on host {told} after step {steps[0]}" in slice_.output(0)
    start_slice(TWO, {"run": {**LONG, "resume": True, "output_dir": str(tmp_path)}}, "last").run()
    same_end(tmp_path, undisturbed)


def test_a_host_that_is_killed_ends_the_others_and_the_run_goes_on(start_slice, undisturbed, tmp_path):
    rng = random.Random(1)
    for turn in range(TIMES):
        run = {"run": {**LONG, **resumed(tmp_path), "output_dir": str(tmp_path), "callbacks": ["tell"]}}
        slice_ = start_slice(TWO, run, f"killed-{turn}", HF_TPU_EXT_HOST_TIMEOUT=str(SILENCE))
        lost = rng.randrange(2)
        assert wait_for_step(slice_, lost, rng.randint(1, 8))
        # In a step, in an evaluation or in a save.
        time.sleep(rng.uniform(0, 0.4))
        slice_.processes[lost].kill()
        began = time.monotonic()
        assert slice_.processes[1 - lost].wait(SILENCE + 10) == EXIT_STATUS, slice_.output(1 - lost)[-2000:]
        assert time.monotonic() - began < SILENCE + 5
        assert f"Host {lost} of 2" in slice_.output(1 - lost)
    start_slice(TWO, {"run": {**LONG, **resumed(tmp_path), "output_dir": str(tmp_path)}}, "last").run()
    same_end(tmp_path, undisturbed)


# ---- What has to be the same ----

RUN = dict(mesh="fsdp", max_steps=6)
DIFFERENCES = {
    "recipe": (dict(host_1={"learning_rate": 2e-3}), ["argument learning_rate: 0.001 on host 0, 0.002 on host 1"]),
    "seed": (dict(host_1={"seed": 7}), ["argument seed: 42 on host 0, 7 on host 1"]),
    "rows": (dict(host_1={"rows": 121}), ["data: train_dataset: 120 rows", "121 rows", "on host 1"]),
    "texts": (dict(host_1={"rows_seed": 3}), ["data: train_dataset", "on host 1"]),
    "weights": (dict(host_1={"weights_seed": 3}), ["model weights", "on host 1"]),
    "compiler": (
        dict(host_1={"environment": {"XLA_NO_SPECIAL_SCALARS": "1"}}),
        ["environment variable XLA_NO_SPECIAL_SCALARS: none on host 0, 1 on host 1"],
    ),
    "version": (dict(host_1={"version": "peft"}), ["package peft", "0.0.0 on host 1"]),
    "sent": (
        dict(callbacks=["rate"]),
        ["Host 1 has sent other data to its chips than host 0 up to step 4", "callback"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_on_all_hosts(name, start_slice):
    settings, words = DIFFERENCES[name]
    slice_ = start_slice(TWO, {"run": {**RUN, **settings}}, "differing", HF_TPU_EXT_HOST_TIMEOUT="20")
    assert slice_.wait(120) == [1, 1]
    for host in range(2):
        for word in words:
            assert word in slice_.output(host), slice_.output(host)[-2000:]
    if name != "sent":
        # Before the first step.
        assert "'loss'" not in slice_.output(0)


def test_what_one_host_does_alone_is_an_error_on_all(start_slice):
    slice_ = start_slice(TWO, {"run": {**RUN, "saves_alone": True}}, "alone")
    assert slice_.wait(120) == [1, 1]
    for host in range(2):
        assert "different places of the run (host 0: a read of what is split over hosts; host 1:" in slice_.output(
            host
        )


def test_num_chips_is_refused(start_slice):
    slice_ = start_slice(TWO, {"run": {**RUN, "num_chips": 2}}, "chips")
    # One that hears of the other's error before its own ends for that.
    statuses = slice_.wait(120)
    assert 1 in statuses and set(statuses) <= {1, EXIT_STATUS}
    words = "num_chips=2, but this machine is one of 2 hosts of a slice"
    for host in range(2):
        assert words in slice_.output(host) and "create a smaller slice" in slice_.output(host)


# ---- Disks ----


def test_a_checkpoint_on_the_disk_of_the_first_host(start_slice, tmp_path):
    """Is written there alone, is an error on both when the other cannot see it, and resumes when it was copied."""
    # One path, which is another directory to each.
    for host in range(2):
        (tmp_path / f"disk-{host}").mkdir()
    own = {f"host_{host}": {"working_dir": str(tmp_path / f"disk-{host}")} for host in range(2)}
    saves = dict(RUN, save_strategy="steps", save_steps=3, output_dir="run", **own)
    start_slice(TWO, {"run": saves}, "own").run()
    disks = [tmp_path / f"disk-{host}/run" for host in range(2)]
    assert [*checkpoints_by_step(disks[0])] == [3, 6] and not checkpoints_by_step(disks[1])
    shutil.rmtree(disks[0] / "checkpoint-6")
    again = dict(saves, resume=True)
    slice_ = start_slice(TWO, {"run": again}, "unseen")
    assert slice_.wait(120) == [1, 1]
    for host in range(2):
        output = slice_.output(host)
        assert "checkpoint-3 is not the same on all hosts: host 1 does not see it" in output
        assert "storage that all hosts see" in output and "--worker=all" in output
    shutil.copytree(disks[0] / "checkpoint-3", disks[1] / "checkpoint-3")
    of_hosts = start_slice(TWO, {"run": again}, "seen").run()
    assert [host["run"]["steps"] for host in of_hosts] == [6, 6]
    assert [*checkpoints_by_step(disks[0])] == [3, 6] and [*checkpoints_by_step(disks[1])] == [3]


def test_a_full_disk_is_an_error_on_all_hosts(start_slice):
    slice_ = start_slice(TWO, {"run": {**RUN, "save_strategy": "steps", "save_steps": 2, "disk_full": True}}, "full")
    assert slice_.wait(120) == [1, 1]
    for host in range(2):
        assert "checkpoint-2 could not be saved" in slice_.output(host)


def test_a_disk_that_is_full_amid_the_optimizer_is_an_error_on_all_hosts(start_slice, tiny_model):
    """Where others wait to give the first the next piece."""
    room = int(1.2 * (tiny_model / "model.safetensors").stat().st_size)
    run = {**RUN, "save_strategy": "steps", "save_steps": 2, "host_0": {"largest_file": room}}
    slice_ = start_slice(TWO, {"run": run}, "amid")
    assert slice_.wait(120) == [1, 1]
    for host in range(2):
        assert "checkpoint-2 could not be saved" in slice_.output(host)
        assert "different places" not in slice_.output(host)


# ---- Clocks ----


def test_hosts_decide_together_whatever_their_clocks_say(start_slice):
    """One is slow, logs and the end go by the clock of each, and one of them finds that its model has changed."""
    run = dict(RUN, mesh="data", max_steps=1000, callbacks=["clock", "slow", "change"], step_replay=True)
    run |= {"logging_steps": 1000}
    first, second = start_slice(TWO, {"run": run}, "clocks").run()
    assert first["run"]["steps"] == second["run"]["steps"] < 1000
    assert_same_log(first["run"]["log"], second["run"]["log"], rel=0)
    assert first["run"]["replays"] == second["run"]["replays"] > 0
    assert first["run"]["why_not"] is None


def test_early_stopping_and_the_best_checkpoint(start_slice, tmp_path):
    run = dict(RUN, max_steps=20, learning_rate=0.5, callbacks=["early"], load_best_model_at_end=True)
    run |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "eval_loss"}
    first, second = start_slice(TWO, {"run": {**run, "output_dir": str(tmp_path)}}, "early").run()
    assert first["run"]["steps"] == second["run"]["steps"] < 20
    assert first["run"]["best"] == second["run"]["best"] is not None
