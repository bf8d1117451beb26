"""GRPO and RLOO on what the model writes itself: rewards rise, programs are replayed, and a resumed run writes the same."""

import json
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from preference import ONE_LAYER
from rollouts import (
    LONGEST,
    OURS,
    STOCK,
    WRITING,
    Case,
    assert_same_numbers,
    assert_written,
    prompts_for,
    train,
    trainer_for,
)
from test_preference_resume import logged_after, weights_and_moments
from trl import GRPOConfig, GRPOTrainer


pytestmark = pytest.mark.ci


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@pytest.fixture(autouse=True)
def writes(xla, monkeypatch):
    monkeypatch.setitem(OURS, "grpo", WRITING["grpo"])
    monkeypatch.setitem(OURS, "rloo", WRITING["rloo"])


def early(completion_ids, **kwargs):
    """Tokens of the first half of the vocabulary."""
    return [sum(token < 128 for token in tokens) / len(tokens) for tokens in completion_ids]


BATCH = {"per_device_train_batch_size": 32, "num_generations": 8, "per_device_eval_batch_size": 32}


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_rewards_rise_by_replayed_programs(models, kind):
    settings = {**BATCH, "learning_rate": 1e-2, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    case = Case(kind, settings, rewards=(early,), steps=20)
    trainer = train(case, models, ours=True)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards[-1] > rewards[0] + 0.2
    scores = 2 if case.kind == "rloo" else 0
    counted = trainer.counted
    # Of RLOO also the log-probabilities of what was written, and those of the reference, each read once.
    assert_written(trainer, 1 + scores)
    assert sum(step.compiles for step in counted[2:]) == 0
    assert sum(step.fallbacks for step in counted) == 0 and trainer.watch.recompiles == 0
    # The time of a step is that of its programs, too. Upstream's would be that of what the host does in `training_step`.
    times = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
    assert len(times) == len(rewards) and min(times) > 0


@pytest.mark.slow
def test_the_ratio_is_one_at_first(models):
    """Log-probabilities of what was written, as it was written, are those of the pass that the loss compares with."""
    settings = {**BATCH, "steps_per_generation": 2, "temperature": 0.7}
    trainer = trainer_for(Case("grpo", settings, steps=4), models, ours=True)
    written, scored = [], []
    generate, run_passes = trainer._text.generate, trainer.run_passes

    def keep_written(prompts, **given):
        written.append(generate(prompts, **given))
        return written[-1]

    def keep_scored(kind, model, batch, *args):
        # As upstream: with dropout, if the model has any.
        assert model.training
        scored.append((batch, run_passes(kind, model, batch, *args)))
        return scored[-1][1]

    trainer._text.generate, trainer.run_passes = keep_written, keep_scored
    trainer.train()
    assert len(written) == len(scored) == 2
    for made, (batch, log_probs) in zip(written, scored, strict=True):
        assert batch["input_ids"].shape == (64, trainer.lengths[-1] + LONGEST)
        for of_row, expected in zip(made.log_probs, log_probs, strict=True):
            torch.testing.assert_close(torch.tensor(of_row), expected[: len(of_row)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_resumed_run_writes_the_same(models, tmp_path, kind):
    """Also in the middle of what was written, which goes on with it; tables of completions are there for each log."""
    settings = {"steps_per_generation": 2, "num_iterations": 2, "logging_steps": 1}
    settings |= {"log_completions": True, "num_completions_to_print": 1}
    case = Case(kind, settings, evaluates=True, model_config=ONE_LAYER, steps=8, rewards=(early,))
    saves = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
    whole = trainer_for(replace(case, settings={**case.settings, **saves}), models, ours=True)
    whole.train()
    for step in (4, 6):
        # What compiles layers with torch_tpu.
        torch.compiler.reset()
        resumed = trainer_for(case, models, ours=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(whole), rtol=0, atol=0)
        assert logged_after(resumed, step) == logged_after(whole, step) != []
    if kind == "grpo":
        # None without rows: of what was written before a checkpoint, a resumed run has no texts.
        tables = list(Path(resumed.args.output_dir, "completions").glob("*.parquet"))
        assert tables and all(len(pandas.read_parquet(table)) for table in tables)
        table = pandas.read_parquet(Path(tmp_path / "run" / "completions" / "completions_00006.parquet"))
        assert {"prompt", "completion", "early", "advantage"} <= set(table.columns) and len(table) == 8


def test_a_run_that_is_resumed_on_fewer_chips_goes_on_as_before(models, tmp_path):
    """A generation is of more batches then, by which upstream shuffles it. As many completions are shown as are generated together."""
    settings = {"log_completions": True, "logging_steps": 1, "steps_per_generation": 1, "learning_rate": 0.02}
    case = Case("grpo", settings, model_config=ONE_LAYER, steps=3, rewards=(early,))
    saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "run")}
    more = {**settings, "per_device_train_batch_size": 8, **saves}
    whole = trainer_for(replace(case, settings=more), models, ours=True)
    assert whole.shares_prompts
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    state = json.loads((checkpoint / "run_state.json").read_text())
    # As a run on two chips has written it.
    state.update(num_workers=2, recipe_rows=[4, 1])
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    fewer = {**settings, "per_device_train_batch_size": 4, "output_dir": str(tmp_path / "resumed")}
    resumed = trainer_for(replace(case, settings=fewer), models, ours=True)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.args.steps_per_generation == 2 and not resumed.shares_prompts
    rewards = [[entry["reward"] for entry in each.state.log_history if "reward" in entry] for each in (whole, resumed)]
    assert len(rewards[0]) == 3 and rewards[0] == rewards[1]
    tables = list((tmp_path / "resumed" / "completions").glob("*.parquet"))
    assert tables and all(len(pandas.read_parquet(table)) == 8 for table in tables)


def test_evaluates_and_predicts_outside_of_a_run(models):
    """Of several sets, and before training; there is no other prediction than the loss."""
    small = {"model_config": ONE_LAYER, "steps": 4}
    case = Case("grpo", {"beta": 0.04, "bf16": True}, lora="new", evaluates=True, rewards=(early,), **small)
    sets = {"a": prompts_for(case, 2, 3), "b": prompts_for(case, 5, 4)}
    trainer = trainer_for(case, models, ours=True, eval_dataset=sets)
    metrics = trainer.evaluate()
    assert metrics.keys() >= {"eval_a_loss", "eval_b_loss", "eval_reward"}
    trainer.train()
    assert trainer.watch.recompiles == 0 and trainer.steps.compiled is None and trainer.steps.why_traced is None
    predicted = trainer.predict(sets["a"])
    assert predicted.predictions is None and "test_loss" in predicted.metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1, "chat_template_kwargs": {"enable_thinking": False}, "log_unique_prompts": True},
        {"top_k": 1, "repetition_penalty": 1.5, "top_p": 0.9},
        {"min_p": 0.999},
        {"generation_kwargs": {"do_sample": False, "min_new_tokens": 5}},
    ],
    ids=str,
)
def test_text_without_chance_is_upstreams(models, monkeypatch, settings):
    monkeypatch.setitem(STOCK, "grpo", (GRPOTrainer, GRPOConfig))
    case = Case("grpo", {"beta": 0.1, **settings}, conversation=True, steps=4)
    ours, stock = (train(case, models, which).state.log_history for which in (True, False))
    assert_same_numbers(ours, stock)
