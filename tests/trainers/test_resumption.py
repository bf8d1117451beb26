"""A run that is resumed with another model or other data than its checkpoint has says so."""

import json
import logging

import pytest
import torch
from fixes import assert_fixes, refusal
from transformers import AutoConfig, AutoModelForCausalLM


EVERY_STEP = dict(max_steps=1, save_strategy="steps", save_steps=1)


def model_with(runs, **sizes):
    """A model of other sizes than the tiny one, for the same tokenizer."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(runs.model_dir, **sizes), dtype=torch.float32)


@pytest.mark.ci
@pytest.mark.parametrize("lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({}, id="lora")])
def test_a_model_of_other_sizes(runs, tmp_path, lora):
    runs.ours(lora=lora, **EVERY_STEP)
    checkpoint = str(runs.output_dir / "checkpoint-1")

    def resume(hidden_size=32, resume_from_checkpoint=None):
        model = model_with(runs, hidden_size=hidden_size)
        settings = {**EVERY_STEP, "max_steps": 2, "output_dir": str(tmp_path / "new")}
        runs.ours(model, lora, train=False, **settings).train(resume_from_checkpoint=resume_from_checkpoint)

    settings = {"hidden_size": 48, "resume_from_checkpoint": checkpoint}
    message = refusal(resume, settings)
    assert message.startswith(f"{checkpoint} is of another model than this run trains: ")
    if lora is None:
        assert "model.embed_tokens.weight has the shape [" in message and ", 48] here" in message
    else:
        assert "lora_A.default.weight has the shape [4, 32] there and [4, 48] here" in message
    assert_fixes(resume, settings, "leave resume_from_checkpoint out")
    # The model of the run that wrote it.
    resume(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("use_peft", "words", "fix"),
    [
        (True, " is of an adapter (it has adapter_config.json), and this run trains a whole model", "use_peft: true"),
        (False, " is of a whole model (it has model.safetensors), and this run trains an adapter", "use_peft: false"),
    ],
    ids=["adapter", "whole"],
)
def test_a_checkpoint_of_an_adapter_or_of_a_whole_model(runs, use_peft, words, fix):
    runs.ours(lora={} if use_peft else None, **EVERY_STEP)
    checkpoint = str(runs.output_dir / "checkpoint-1")

    def resume(use_peft, resume_from_checkpoint=None):
        trainer = runs.ours(lora={} if use_peft else None, train=False, **{**EVERY_STEP, "max_steps": 2})
        trainer._find_checkpoint(resume_from_checkpoint)

    settings = {"use_peft": not use_peft, "resume_from_checkpoint": checkpoint}
    assert_fixes(resume, settings, fix, "leave resume_from_checkpoint out")
    assert refusal(resume, settings).startswith(checkpoint + words)


def test_an_adapter_of_another_rank(runs):
    runs.ours(lora={}, **EVERY_STEP)
    trainer = runs.ours(lora={"r": 8}, train=False, **{**EVERY_STEP, "max_steps": 2})
    message = refusal(lambda: trainer.train(resume_from_checkpoint=True), {})
    assert "[4, 32] there and [8, 32] here" in message and "with the same adapter (lora_*)" in message


def test_another_vocabulary(runs):
    runs.ours(**EVERY_STEP)
    trainer = runs.ours(model=model_with(runs, vocab_size=300), train=False, **{**EVERY_STEP, "max_steps": 2})
    message = refusal(lambda: trainer.train(resume_from_checkpoint=True), {})
    assert ".weight has the shape [" in message and "[300, 32] here" in message


@pytest.mark.parametrize("count", [22, 40])
def test_rows_that_have_changed(runs, rows, caplog, count):
    runs.ours(**EVERY_STEP)
    checkpoint = runs.output_dir / "checkpoint-1"
    assert json.loads((checkpoint / "run_state.json").read_text())["train_rows"] == 22
    trainer = runs.ours(train=False, kwargs={"train_dataset": rows(count)}, **{**EVERY_STEP, "max_steps": 2})
    caplog.clear()
    trainer.train(resume_from_checkpoint=True)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = [line for line in lines if "train_dataset had" in line]
    if count == 22:
        assert not said
    else:
        (line,) = said
        assert line.startswith(f"train_dataset had 22 rows when {checkpoint} was written, and has 40 now. ")


def test_a_run_that_has_done_all_its_steps(runs, caplog):
    runs.ours(**EVERY_STEP)
    caplog.clear()
    trainer = runs.ours(train=False, **EVERY_STEP)
    trainer.train(resume_from_checkpoint=True)
    words = f"{runs.output_dir / 'checkpoint-1'} is of step 1, and this run has 1: nothing is left to train. "
    (line,) = [record.getMessage() for record in caplog.records if "nothing is left" in record.getMessage()]
    assert line.startswith(words) and trainer.state.global_step == 1
    # As the line says.
    caplog.clear()
    trainer = runs.ours(train=False, **{**EVERY_STEP, "max_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    assert "nothing is left" not in caplog.text and trainer.state.global_step == 2


def test_rows_of_a_stream_are_not_counted(runs, caplog):
    data = runs.train_dataset.to_iterable_dataset()
    runs.ours(kwargs={"train_dataset": data}, **EVERY_STEP)
    assert "train_rows" not in json.loads((runs.output_dir / "checkpoint-1" / "run_state.json").read_text())
    trainer = runs.ours(train=False, kwargs={"train_dataset": data}, **{**EVERY_STEP, "max_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    assert "train_dataset had" not in caplog.text


@pytest.mark.ci
def test_rows_of_a_device_that_keep_the_global_batch_size_are_no_mismatch(runs, caplog):
    """Upstream would compare those of the recipe with what two chips took at once."""
    runs.ours(per_device_train_batch_size=4, **EVERY_STEP)
    checkpoint = runs.output_dir / "checkpoint-1"
    state = json.loads((checkpoint / "run_state.json").read_text())
    # As a run on two chips has written it.
    state.update(num_workers=2, recipe_rows=[2, 1])
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    trainer = runs.ours(per_device_train_batch_size=2, train=False, **{**EVERY_STEP, "max_steps": 2})
    trainer.train(resume_from_checkpoint=True)
    assert "To keep it on 1: 2 per chip x 2 gradient accumulation steps" in caplog.text
    assert "do not match" not in caplog.text and trainer.state.global_step == 2
