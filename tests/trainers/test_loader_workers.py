"""Processes that load batches, forked beside the XLA runtime, and variables of the environment."""

import os

import pytest


@pytest.mark.slow
def test_workers_change_nothing(runs, same_logs):
    """Two epochs, and an evaluation in each: processes are forked four times, from the second on beside a running program."""
    schedule = {"max_steps": 11, "eval_strategy": "steps", "eval_steps": 5}
    same_logs(runs.ours(dataloader_num_workers=2, **schedule), runs.ours(**schedule), rel=0)


def test_a_variable_that_would_stop_workers_is_announced(runs, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    trainer = runs.ours(train=False)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    trainer = runs.ours(train=False, dataloader_num_workers=2, dataloader_multiprocessing_context="fork")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert [line for line in trainer.adapted.changes if line.startswith("TOKENIZERS_PARALLELISM=true is false")]
