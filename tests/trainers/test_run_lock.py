"""Several runs in one output directory: each goes on with its own checkpoints, and none destroys anything of another."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TrainingPreempted
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.backends.processes import ALONE, Processes
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step
from hf_tpu_ext.trainers.checkpoint.run_lock import LOCK_NAME, only_run_in
from hf_tpu_ext.trainers.checkpoint.verification import find_damage


SAVES = dict(max_steps=6, save_strategy="steps", save_steps=2)


@pytest.fixture
def make(runs):
    """Makes trainers on the eager CPU, for one directory."""

    def make(callbacks=(), **config):
        try:
            return runs.ours(
                train=False,
                config_cls=TPUSFTConfig,
                backend="cpu",
                kwargs={"callbacks": list(callbacks)},
                **{**SAVES, **config},
            )
        finally:
            select_backend("xla")

    return make


class AtStep(TrainerCallback):
    def __init__(self, step, function):
        self._step, self._function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._function()


def files(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def stop():
    signal.raise_signal(signal.SIGTERM)


# ---- Checkpoints of another run ----


def test_a_run_that_begins_anew_is_resumed_from_its_own_checkpoint(make, runs, caplog):
    """Run B, stopped after step 3, in the directory of run A, which had reached step 6."""
    make().train()
    before = {name: data for name, data in files(runs.output_dir).items() if name.startswith(("checkpoint", "run."))}
    caplog.clear()
    with pytest.raises(TrainingPreempted) as stopped:
        make([AtStep(3, stop)], learning_rate=1e-5).train()
    lines = [record.getMessage() for record in caplog.records if "_earlier-1" in record.getMessage()]
    aside = runs.output_dir / "_earlier-1"
    assert lines == [
        f"{runs.output_dir} holds checkpoint-2, checkpoint-4, checkpoint-6 from before this run, which begins "
        f"anew. They are moved to {aside}, where nothing deletes them. To go on with one of them, stop this run and set "
        f"resume_from_checkpoint='{aside}/checkpoint-6'."
    ]
    assert {name: data for name, data in files(aside).items() if name in before} == before
    assert list(checkpoints_by_step(runs.output_dir)) == [2, 3] and "checkpoint-3" in str(stopped.value)
    resumed = make(learning_rate=1e-5)
    resumed.train(resume_from_checkpoint=True)
    logs = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4, 5, 6]
    assert all(entry["learning_rate"] <= 1e-5 for entry in logs)
    # As the line says.
    make(max_steps=7).train(resume_from_checkpoint=re.search("resume_from_checkpoint='(.*)'", lines[0])[1])
    assert list(checkpoints_by_step(runs.output_dir)) == [7]
    assert list(checkpoints_by_step(runs.output_dir / "_earlier-2")) == [2, 3, 4, 6]


def test_a_run_that_goes_back_goes_on_from_there(make, runs):
    """What came after the checkpoint that it resumes is of the run before."""
    make().train()
    with pytest.raises(TrainingPreempted):
        make([AtStep(3, stop)]).train(resume_from_checkpoint=str(runs.output_dir / "checkpoint-2"))
    assert list(checkpoints_by_step(runs.output_dir)) == [2, 3]
    assert list(checkpoints_by_step(runs.output_dir / "_earlier-1")) == [4, 6]


@pytest.mark.ci
def test_a_run_that_cannot_be_prepared_leaves_an_earlier_one(make, runs, monkeypatch):
    """As where the optimizer needs a package that is not installed. A run that begins sets the earlier one aside."""
    make(run_report=True).train()
    before, trainer = files(runs.output_dir), make(run_report=True)

    def fail(*args):
        raise ImportError("You need to install an optimizer")

    with monkeypatch.context() as patch, pytest.raises(ImportError):
        patch.setattr(trainer, "create_optimizer", fail)
        trainer.train()
    assert files(runs.output_dir) == before
    trainer.train()
    assert {f"_earlier-1/{name}" for name in before if name.startswith("checkpoint-")} <= files(runs.output_dir).keys()


def test_the_limit_deletes_nothing_of_another_run(make, runs):
    make().train()
    make(save_total_limit=1).train()
    assert list(checkpoints_by_step(runs.output_dir)) == [6]
    earlier = checkpoints_by_step(runs.output_dir / "_earlier-1")
    assert list(earlier) == [2, 4, 6] and not any(find_damage(path) for path in earlier.values())


def test_a_run_of_stock_goes_on_with_its_checkpoints(make, runs):
    runs.stock(**SAVES)
    resumed = make(max_steps=8, save_total_limit=2)
    resumed.train(resume_from_checkpoint=True)
    assert list(checkpoints_by_step(runs.output_dir)) == [6, 8] and not list(runs.output_dir.glob("_*"))


def test_a_run_without_a_checkpoint_has_none_to_resume(make, runs):
    """Nothing of another run stands in for it."""
    make().train()
    make(max_steps=1, save_strategy="no").train()
    with pytest.raises(
        ValueError,
        match=rf"No valid checkpoint found in output directory .* Of other runs there is {runs.output_dir}/_earlier-1/checkpoint-6",
    ):
        make().train(resume_from_checkpoint=True)


# ---- Runs at the same time ----


def test_a_second_run_does_not_begin_while_the_first_writes(make, runs):
    def second():
        before = files(runs.output_dir)
        with pytest.raises(ValueError) as refused:
            make(max_steps=1).train()
        assert files(runs.output_dir) == before
        refusals.append(str(refused.value))

    refusals = []
    half_written = runs.output_dir / "_tmp-checkpoint-4" / "checkpoint-4"

    def half_write():
        half_written.mkdir(parents=True)
        second()
        half_written.rmdir()
        half_written.parent.rmdir()

    make([AtStep(3, half_write)]).train()
    (refusal,) = refusals
    assert re.fullmatch(
        rf"Another run writes to output_dir='{runs.output_dir}' now \(process {os.getpid()} on \S+, since [^)]+\). Set "
        "output_dir to another directory, or wait until that run has ended.",
        refusal,
    )
    # It has ended.
    make(max_steps=1).train()
    assert not (runs.output_dir / LOCK_NAME).exists()


HOLDER = """
import os, sys, time
from hf_tpu_ext.backends.processes import ALONE
from hf_tpu_ext.trainers.checkpoint.run_lock import only_run_in

with only_run_in(sys.argv[1], ALONE):
    if os.fork() == 0:
        # As a worker of a loader that outlives its process.
        os.close(1)
        time.sleep(20)
        os._exit(0)
    print("holds", flush=True)
    time.sleep(60)
"""


def test_a_run_that_was_killed_holds_nothing(tmp_path):
    holder = forked.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(ValueError, match=f"process {holder.pid} on"), only_run_in(tmp_path, ALONE):
            pass
        # A process that writes nothing needs no lock.
        others = Processes()
        others.index = 1
        with only_run_in(tmp_path, others):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert (tmp_path / LOCK_NAME).exists()
    with only_run_in(tmp_path, ALONE):
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_deleted_is_given_back(tmp_path, monkeypatch):
    """As on a disk that has gone read-only: the error of the run is shown, and another run may begin."""

    def fail(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="of the run"), only_run_in(tmp_path, ALONE):
        patch.setattr(Path, "unlink", fail)
        raise RuntimeError("of the run")
    with only_run_in(tmp_path, ALONE):
        assert (tmp_path / LOCK_NAME).exists()


def test_one_of_many_gets_the_lock(tmp_path):
    """Runs that begin and end at once: never two together, though each ends by deleting the file."""
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from hf_tpu_ext.backends.processes import ALONE
from hf_tpu_ext.trainers.checkpoint.run_lock import only_run_in

for _ in range(4):
    if os.fork() == 0:
        entered = 0
        while entered < 100:
            try:
                with only_run_in(sys.argv[1], ALONE):
                    Path(sys.argv[1], "inside").mkdir()
                    Path(sys.argv[1], "inside").rmdir()
                    entered += 1
            except ValueError:
                pass
        os._exit(0)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)])
"""
    result = forked.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=100)
    assert result.stdout == "[0, 0, 0, 0]\n", result.stderr[-2000:]
