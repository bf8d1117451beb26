"""Checkpoints on disk: whole or not there, and a full disk costs no good one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from full_disk import largest_file
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainerState
from written_checkpoints import contents, write_checkpoint

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.trainers.checkpoint.directories import (
    checkpoints_by_step,
    delete_all_but,
    delete_old,
    remove_leftovers,
    temporary_dir,
)
from hf_tpu_ext.trainers.checkpoint.earlier_run import find_best, set_aside
from hf_tpu_ext.trainers.checkpoint.lookup import find_checkpoint
from hf_tpu_ext.trainers.checkpoint.verification import MANIFEST_NAME, find_damage


# ---- Places ----


def test_newest_is_by_number_whatever_the_clock(tmp_path):
    for step, changed in ((2, 3000), (10, 1000), (9, 2000)):
        os.utime(write_checkpoint(tmp_path, step), (changed, changed))
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-30").write_text("no directory")
    assert list(checkpoints_by_step(tmp_path)) == [2, 9, 10]
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [2, 4, 6, 8, 50]),
        (0, None, [2, 4, 6, 8, 50]),
        (3, None, [4, 6, 8, 50]),
        (1, None, [8, 50]),
        (2, 2, [2, 8, 50]),
        (1, 2, [2, 8, 50]),
        (1, 8, [8, 50]),
        (9, None, [2, 4, 6, 8, 50]),
    ],
)
def test_oldest_are_deleted(tmp_path, limit, best, left):
    """Checkpoint 50 is of another run in the same directory, and is left alone. The clock went back, so the newest looks oldest."""
    for step in (50, 2, 4, 6, 8):
        os.utime(write_checkpoint(tmp_path, step), (9000 - step, 9000 - step))
    newest = tmp_path / "checkpoint-8"
    delete_old(tmp_path, newest, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert list(checkpoints_by_step(tmp_path)) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{step}" for step in left)


def put_elsewhere(checkpoint):
    """Move a checkpoint to another disk, and leave a link in its place."""
    elsewhere = checkpoint.parent.with_name("disk") / checkpoint.name
    elsewhere.parent.mkdir(exist_ok=True)
    shutil.move(checkpoint, elsewhere)
    checkpoint.symlink_to(elsewhere)
    return elsewhere


def test_a_checkpoint_behind_a_link_is_resumed_from_and_not_moved(tmp_path):
    """One that was put on another disk, with a link in its place, is this run's as before."""
    older, newest = (write_checkpoint(tmp_path / "run", step) for step in (2, 4))
    put_elsewhere(newest)
    resumed = find_checkpoint(True, str(tmp_path / "run"))
    assert resumed == str(newest)
    set_aside(tmp_path / "run", resumed)
    assert list(checkpoints_by_step(tmp_path / "run")) == [2, 4]
    set_aside(tmp_path / "run", str(older))
    assert list(checkpoints_by_step(tmp_path / "run")) == [2]
    assert find_damage(tmp_path / "run" / "_earlier-1" / "checkpoint-4") is None


def test_an_old_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    """As of a file that somebody has open on NFS. The next run removes what is left."""

    def busy(path):
        raise OSError(16, "Device or resource busy")

    older, newest = (write_checkpoint(tmp_path, step) for step in (2, 4))
    monkeypatch.setattr("shutil.rmtree", busy)
    delete_old(tmp_path, newest, 1, None)
    monkeypatch.undo()
    assert "Device or resource busy), and is left as" in caplog.text and not older.exists()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]


def test_a_damaged_checkpoint_is_moved_and_not_offered(tmp_path, caplog):
    older, newest = (write_checkpoint(tmp_path, step) for step in (2, 4))
    set_aside(tmp_path, str(older))
    assert f"set resume_from_checkpoint='{tmp_path / '_earlier-1' / 'checkpoint-4'}'" in caplog.text
    caplog.clear()
    write_checkpoint(tmp_path, 4)
    set_aside(tmp_path, str(older), took_newest=True)
    assert "They are moved to" in caplog.text and "To go on" not in caplog.text


def test_a_checkpoint_behind_a_link_is_not_deleted(tmp_path):
    older, newest = (write_checkpoint(tmp_path / "run", step) for step in (2, 4))
    elsewhere = put_elsewhere(older)
    delete_old(tmp_path / "run", newest, 1, None)
    delete_all_but(tmp_path / "run", newest, str(newest))
    assert find_damage(elsewhere) is None and sorted(checkpoints_by_step(tmp_path / "run")) == [2, 4]
    remove_leftovers(tmp_path / "run")


def test_what_has_the_name_of_a_checkpoint_is_moved_and_not_replaced(tmp_path):
    (tmp_path / "checkpoint-2").write_text("mine")
    (tmp_path / "checkpoint-4").symlink_to(tmp_path / "gone")
    (tmp_path / "checkpoint-notes").write_text("mine")
    set_aside(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_earlier-1", "checkpoint-notes"]
    assert (tmp_path / "_earlier-1" / "checkpoint-2").read_text() == "mine"
    assert (tmp_path / "_earlier-1" / "checkpoint-4").is_symlink()


RECORD = '{"event": "begin", "at": 0}\n'


@pytest.mark.parametrize(
    ("record", "resumes", "writes_record", "moved"),
    [
        (RECORD, False, True, True),
        (RECORD, False, False, True),
        ("", False, True, True),
        # Its logs would be taken for those of the run that is resumed.
        (RECORD, True, True, True),
        ('{"mine": 1}\n', False, True, True),
        ("mine", False, True, True),
        ("mine", False, False, False),
        (None, False, True, True),
    ],
)
def test_the_record_of_another_run_is_not_gone_on_with(tmp_path, record, resumes, writes_record, moved):
    run_dir, other = tmp_path / "run", write_checkpoint(tmp_path / "other", 4)
    run_dir.mkdir()
    before = {"report.html": b"mine"} | ({} if record is None else {"run.jsonl": record.encode()})
    for name, content in before.items():
        (run_dir / name).write_bytes(content)
    set_aside(run_dir, str(other) if resumes else None, writes_record)
    place = run_dir / "_earlier-1" if moved else run_dir
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert moved == (run_dir / "_earlier-1").exists()


def write_export(directory, run_dir):
    directory.mkdir(parents=True)
    (directory / "export.json").write_text(json.dumps({"run_dir": str(run_dir)}))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_exports_go_with_the_run_that_they_are_of(tmp_path, monkeypatch, caplog, has_checkpoint):
    """They would be loaded for what the new run has trained."""
    monkeypatch.chdir(tmp_path)
    run_dir = Path("run")
    for name in ("merged", "quantized-ema", "base"):
        write_export(run_dir / name, run_dir)
    write_export(run_dir / "of_a_checkpoint", run_dir.absolute() / "checkpoint-2")
    write_export(run_dir / "of_another_run", "other")
    (run_dir / "mine").mkdir()
    (run_dir / "mine" / "export.json").write_text("[]")
    (run_dir / "run.jsonl").write_text(RECORD)
    checkpoint = write_checkpoint(run_dir, 2) if has_checkpoint else None
    if has_checkpoint:
        set_aside(run_dir, str(checkpoint))
        assert not caplog.text and not (run_dir / "_earlier-1").exists()
    set_aside(run_dir, None, models_of_run=["run/base", "Qwen/Qwen3-0.6B"])
    assert sorted(path.name for path in run_dir.iterdir()) == ["_earlier-1", "base", "mine", "of_another_run"]
    moved = ["merged", "of_a_checkpoint", "quantized-ema", "run.jsonl"]
    assert (
        sorted(path.name for path in (run_dir / "_earlier-1").iterdir()) == ["checkpoint-2"] * has_checkpoint + moved
    )
    checkpoints = "checkpoint-2, " * has_checkpoint
    assert (
        f"run holds {checkpoints}merged, of_a_checkpoint, quantized-ema, run.jsonl from before this run, which begins anew. They are "
        "moved to run/_earlier-1, where nothing deletes them."
    ) in caplog.text


WEIGHTS = {
    "model": ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"],
    "adapter": ["adapter_config.json", "adapter_model.safetensors", "ema.safetensors", "tokenizer_config.json"],
}


@pytest.mark.parametrize("names", WEIGHTS.values(), ids=WEIGHTS)
def test_the_model_that_a_run_has_saved_goes_with_it(tmp_path, names, caplog):
    """It would be taken for the new one until that is saved, and then be replaced."""
    # The card of a LoRA run would be that of the full model after it.
    names, mine = [*names, "README.md"], ["notes.txt", "data.json"]
    for name in [*names, *mine]:
        (tmp_path / name).write_text(name)
    checkpoint = write_checkpoint(tmp_path, 2)
    # A run that has nothing left to do, or trains this model, leaves it.
    set_aside(tmp_path, str(checkpoint), max_steps=2)
    shutil.rmtree(checkpoint)
    set_aside(tmp_path, None, models_of_run=[str(tmp_path)])
    assert not caplog.text
    set_aside(tmp_path, None)
    assert {path.name: path.read_text() for path in (tmp_path / "_earlier-1").iterdir()} == {
        name: name for name in names
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["_earlier-1", *mine])
    assert (
        f"{tmp_path} holds the files of a saved model from before this run, which begins anew. They are moved to"
        in caplog.text
    )


def test_a_model_goes_with_the_checkpoints_that_a_run_goes_back_before(tmp_path):
    older, _ = (write_checkpoint(tmp_path, step) for step in (2, 4))
    (tmp_path / "model.safetensors").touch()
    set_aside(tmp_path, str(older))
    assert sorted(path.name for path in (tmp_path / "_earlier-1").iterdir()) == ["checkpoint-4", "model.safetensors"]


def test_a_model_of_a_run_that_is_to_train_longer(tmp_path, caplog):
    (tmp_path / "model.safetensors").touch()
    set_aside(tmp_path, str(write_checkpoint(tmp_path, 2)), max_steps=4)
    assert [path.name for path in (tmp_path / "_earlier-1").iterdir()] == ["model.safetensors"]
    assert (
        f"{tmp_path} holds the files of a saved model from before this run, which goes on from {tmp_path / 'checkpoint-2'}. They are moved"
    ) in caplog.text


def test_completions_of_an_earlier_run(tmp_path, caplog):
    """Those of a run that is resumed are its own. TRL replaces files of the same step."""
    checkpoint = write_checkpoint(tmp_path, 2)
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "completions_00001.parquet").touch()
    assert set_aside(tmp_path, str(checkpoint)) is None
    aside = set_aside(tmp_path, None)
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoint-2", "completions"]
    # TRL has made the directory by then.
    assert not any((tmp_path / "completions").iterdir())
    (tmp_path / "completions" / "mine.txt").touch()
    assert set_aside(tmp_path, None) is None


@pytest.mark.parametrize("of_same_run", [True, False])
def test_the_best_checkpoint_is_of_the_run_that_is_resumed(tmp_path, caplog, of_same_run):
    """Another run may have written one of the same step, in the place where the best was."""
    recorded, copied = write_checkpoint(tmp_path / "run", 2), write_checkpoint(tmp_path / "copy", 4)
    history = [{"loss": 1.5 if of_same_run else 1.6}] * 5 + [{"loss": float("nan")}]
    state = TrainerState(best_global_step=2, best_model_checkpoint=str(recorded), log_history=history)
    assert find_best(state, str(copied), None) == str(recorded)
    set_aside(tmp_path / "run", str(copied))
    moved = tmp_path / "run" / "_earlier-1" / "checkpoint-2"
    caplog.clear()
    if of_same_run:
        assert find_best(state, str(copied), moved.parent) == str(moved)
        assert find_best(state, str(moved.with_name("checkpoint-4")), None) == str(moved)
        assert f"The best checkpoint so far, of step 2, is {moved} now." in caplog.text
    else:
        assert find_best(state, str(copied), moved.parent) is None
        assert f"was found neither in {recorded} nor beside {copied}" in caplog.text


def test_files_of_a_model_without_weights_are_somebody_elses(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    set_aside(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_an_export_that_a_run_trains_stays(runs):
    """An adapter names it as its base."""
    exports = {name: runs.output_dir / name for name in ("merged", "converted")}
    for path in exports.values():
        write_export(path, runs.output_dir)
    shutil.copytree(runs.model_dir, exports["merged"], dirs_exist_ok=True)
    runs.ours(str(exports["merged"]), lora={}, max_steps=1)
    assert exports["merged"].is_dir() and not exports["converted"].exists()
    assert (runs.output_dir / "_earlier-1" / "converted" / "export.json").is_file()


def test_what_was_there_is_replaced(tmp_path):
    write_checkpoint(tmp_path, 4, seed=1)
    checkpoint = write_checkpoint(tmp_path, 4, seed=2)
    other = write_checkpoint(tmp_path / "other", 4, seed=2)
    assert contents(checkpoint) == contents(other) and find_damage(checkpoint) is None
    assert [path.name for path in tmp_path.glob("*check*")] == ["checkpoint-4"]


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    whole = write_checkpoint(tmp_path, 4)
    (temporary_dir(tmp_path / "checkpoint-6") / "checkpoint-6").mkdir(parents=True)
    (tmp_path / "_tmp-mine").mkdir()
    (tmp_path / "_tmp-checkpoint-mine").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_tmp-checkpoint-mine",
        "_tmp-mine",
        whole.name,
    ]


@pytest.mark.parametrize("written", [True, False])
def test_a_checkpoint_that_was_to_be_replaced_is_not_lost(tmp_path, written):
    """The process was killed between the two renames, before and after the second."""
    before = write_checkpoint(tmp_path, 4, seed=1)
    temporary = temporary_dir(before)
    temporary.mkdir()
    before.rename(temporary / "replaced")
    if written:
        write_checkpoint(tmp_path / "other", 4, seed=2).rename(before)
    remove_leftovers(tmp_path)
    expected = write_checkpoint(tmp_path / "expected", 4, seed=2 if written else 1)
    assert contents(before) == contents(expected) and not temporary.exists()


# ---- Saves of a trainer ----


SAVES = dict(max_steps=4, save_strategy="steps", save_steps=2, save_total_limit=1)


class FullDisk(TPUSFTTrainer):
    """The disk is full from one file of the second checkpoint on."""

    full_in = None

    def _hook(self, name, *args):
        if name == self.full_in and self.state.global_step == 4:
            with largest_file(100):
                return getattr(super(), name)(*args)
        return getattr(super(), name)(*args)

    def _save(self, *args):
        self._hook("_save", *args)

    def _save_optimizer_and_scheduler(self, *args):
        self._hook("_save_optimizer_and_scheduler", *args)

    def _save_rng_state(self, *args):
        self._hook("_save_rng_state", *args)


@pytest.mark.parametrize("full_in", ["_save", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_full_disk_leaves_the_last_good_checkpoint(runs, full_in):
    trainer = runs.ours(**SAVES, cls=FullDisk, train=False)
    trainer.full_in = full_in
    with pytest.raises(OSError) as error:
        trainer.train()
    good = runs.output_dir / "checkpoint-2"
    for words in (
        "checkpoint-4 could not be saved",
        f"{good} is complete",
        f"The disk of {runs.output_dir} has ",
        "Make room",
        "save_total_limit",
    ):
        assert words in str(error.value)
    assert list(checkpoints_by_step(runs.output_dir)) == [2] and find_damage(good) is None
    assert not list(runs.output_dir.glob("_tmp-*"))
    resumed = runs.ours(**SAVES, train=False)
    resumed.train(resume_from_checkpoint=True)
    assert list(checkpoints_by_step(runs.output_dir)) == [4]


class TurnedReadOnly(TrainerCallback):
    """The output directory is one that nobody can write to, from the third step on."""

    def __init__(self, output_dir):
        self.output_dir = output_dir

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.output_dir.unlink()
            self.output_dir.symlink_to("/sys/kernel")


def test_output_that_becomes_read_only(runs, tmp_path):
    (tmp_path / "real").mkdir()
    runs.output_dir.symlink_to(tmp_path / "real")
    trainer = runs.ours(**SAVES, train=False, kwargs={"callbacks": [TurnedReadOnly(runs.output_dir)]})
    with pytest.raises(OSError, match="checkpoint-4 could not be saved.*(not permitted|denied).*output_dir"):
        trainer.train()
    assert find_damage(tmp_path / "real" / "checkpoint-2") is None


def test_a_save_that_is_interrupted_leaves_no_checkpoint(runs):
    """The second signal comes in the middle of a save, in the place of a checkpoint that this run has written before."""
    trainer = runs.ours(**{**SAVES, "save_total_limit": 2})
    before = contents(runs.output_dir / "checkpoint-4")

    def stop(output_dir):
        raise KeyboardInterrupt

    trainer._save_rng_state = stop
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint(trainer.model, None)
    assert contents(runs.output_dir / "checkpoint-4") == before
    assert not list(runs.output_dir.glob("_tmp-*"))


@pytest.mark.ci
def test_best_checkpoint_has_its_final_path(runs, capfd):
    """Upstream loads it at the end, and keeps it whatever the limit is; also after the directory was moved."""
    evaluates = dict(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    config = dict(**SAVES, **evaluates, metric_for_best_model="eval_loss", greater_is_better=True)
    trainer = runs.ours(**config)
    state = json.loads((runs.output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] > losses[1]
    # The line is of the model that is there at the end.
    line = (
        f"Evaluation loss: {losses[0]:.4f} -> {losses[0]:.4f} at step 2, whose weights are loaded (at the last step "
    )
    assert f"{line}{losses[1]:.4f})\n" in capfd.readouterr().out
    assert state["best_model_checkpoint"] == str(runs.output_dir / "checkpoint-2")
    assert trainer.state.best_model_checkpoint == str(runs.output_dir / "checkpoint-2")
    assert list(checkpoints_by_step(runs.output_dir)) == [2]
    assert find_damage(runs.output_dir / "checkpoint-2") is None

    moved = runs.output_dir.rename(runs.output_dir.with_name("moved"))
    resumed = runs.ours(**config, train=False, output_dir=str(moved))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.best_model_checkpoint == str(moved / "checkpoint-2")


@pytest.mark.ci
def test_the_best_checkpoint_that_is_moved_is_loaded_at_the_end(runs, tmp_path, capfd):
    """A run that goes on from a copy moves the best one out of its way, and one that goes on from there finds it beside."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    config = dict(**SAVES, **best, eval_strategy="steps", eval_steps=2, config_cls=TPUSFTConfig, ema_decay=0.9)
    runs.ours(**{**config, "save_total_limit": None})
    copied, earlier = tmp_path / "copied" / "checkpoint-4", runs.output_dir / "_earlier-1"
    shutil.copytree(runs.output_dir / "checkpoint-4", copied)
    before = contents(runs.output_dir / "checkpoint-2")
    # Of the second, what the first has written is in the way.
    for checkpoint in (copied, earlier / "checkpoint-4"):
        resumed = runs.ours(**{**config, "max_steps": 6}, train=False)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.best_model_checkpoint == str(earlier / "checkpoint-2")
        assert "at step 2, whose weights are loaded" in capfd.readouterr().out
        resumed.save_model(str(tmp_path / "saved"))
        for name in ("model.safetensors", "ema.safetensors"):
            weights, of_best = load_file(tmp_path / "saved" / name), load_file(earlier / "checkpoint-2" / name)
            assert all(torch.equal(weights[key], of_best[key]) for key in of_best)
        assert contents(earlier / "checkpoint-2") == before and find_damage(earlier / "checkpoint-4") is None
        assert list(checkpoints_by_step(runs.output_dir)) == [6]
    assert find_damage(runs.output_dir / "_earlier-2" / "checkpoint-6") is None


def test_a_directory_of_the_user_is_no_checkpoint_of_the_run(runs):
    """Upstream deletes it at the end of a run that keeps its best checkpoint only."""
    mine = runs.output_dir / "checkpoint-3-mine"
    mine.mkdir(parents=True)
    best = dict(load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, metric_for_best_model="loss")
    runs.ours(**SAVES, **best, greater_is_better=True)
    assert mine.is_dir() and len(checkpoints_by_step(runs.output_dir)) == 1


@pytest.mark.ci
def test_hub_gets_the_finished_checkpoint(runs, monkeypatch):
    pushed = []
    trainer = runs.ours(**SAVES, train=False)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, find_damage(Path(folder))))
    )
    trainer.train()
    assert pushed == [(str(runs.output_dir / f"checkpoint-{step}"), None) for step in (2, 4)]


def test_checkpoint_of_stock_has_no_manifest_and_is_taken(runs):
    runs.stock(**SAVES)
    checkpoint = runs.output_dir / "checkpoint-4"
    assert not (checkpoint / MANIFEST_NAME).exists()
    assert find_checkpoint(True, str(runs.output_dir)) == find_checkpoint(str(checkpoint), "") == str(checkpoint)


def test_a_finished_run_that_is_resumed_takes_no_step(runs, same_logs):
    """Upstream asks whether a run is to end after a step only."""
    finished = runs.ours(**SAVES)
    resumed = runs.ours(**SAVES, train=False)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    fetch = resumed.backend.fetch
    torch.testing.assert_close(
        fetch(dict(resumed.model.state_dict())), fetch(dict(finished.model.state_dict())), rtol=0, atol=0
    )
