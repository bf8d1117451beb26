"""A run with preferences that is resumed is the run that was never stopped, its reference included."""

from dataclasses import replace

import datasets
import pytest
import torch
from preference import Case, assert_same_numbers, train, trainer_for

from hf_tpu_ext.trainers.run import layers


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("resumed")


ACCUMULATED = {"gradient_accumulation_steps": 2}
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
DROPS = {"lora": "new", "lora_dropout": 0.3}
CASES = {
    "dpo-synced": Case("dpo", {**SYNCED, "scan_layers": "on", "dataloader_drop_last": True}),
    "dpo-full": Case("dpo"),
    "dpo-lora": Case("dpo", {**ACCUMULATED, "disable_dropout": False}, evaluates=True, **DROPS),
    "dpo-lora-given": Case("dpo", lora="given"),
    "dpo-precomputed": Case("dpo", {"precompute_ref_log_probs": True}, evaluates=True),
    "kto-lora": Case("kto", {**ACCUMULATED, "disable_dropout": False}, evaluates=True, **DROPS),
    "kto-synced": Case("kto", SYNCED),
    "kto-precomputed": Case("kto", {**ACCUMULATED, "precompute_ref_log_probs": True}, lora="new"),
    "reward-lora": Case("reward", {"disable_dropout": False}, evaluates=True, **DROPS),
    "reward-full": Case("reward", ACCUMULATED),
}
TIMED = ("runtime", "per_second", "flos", "preparation_time", "step_time", "phase/", "mfu", "memory")


def logged_after(trainer, step):
    """What was logged after a step, but times, and but the closing summary, which covers only the steps of its call."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMED)}
        for entry in trainer.state.log_history[:-1]
        if entry["step"] > step
    ]


def weights_and_moments(trainer):
    weights = trainer.backend.fetch(dict(trainer.model.state_dict()))
    if trainer.args.to_dict().get("sync_ref_model"):
        weights |= {f"reference {name}": value for name, value in reference_of(trainer).items()}
    return weights, trainer.optimizer.state_dict()["state"]


def reference_of(trainer):
    return trainer.backend.fetch(dict(trainer.ref_model.state_dict()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name == "dpo-synced" else pytest.mark.slow) for name in CASES]
)
def test_resumes_bit_for_bit(xla, models, tmp_path, monkeypatch, name):
    """At a log, and between two, of which the first covers only the steps since."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "run")}
    case = replace(CASES[name], steps=6)
    whole = trainer_for(replace(case, settings={**case.settings, **saves}), models, ours=True)
    whole.train()
    for step, same_after in ((3, 4), (4, 4)):
        resumed = trainer_for(case, models, ours=True)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(whole), rtol=0, atol=0)
        assert logged_after(resumed, same_after) == logged_after(whole, same_after) != []


def test_a_checkpoint_without_the_reference_says_so(xla, models, tmp_path, caplog):
    """As of upstream's trainer, which goes on with the reference as it was given."""
    case = Case("kto", {**SYNCED, "output_dir": str(tmp_path)})
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    trainer = trainer_for(case, models, ours=True)
    trainer._find_checkpoint(str(checkpoint))
    assert f"{checkpoint} is resumed without the reference that sync_ref_model had reached" in caplog.text
    assert "not the run that was never stopped" in caplog.text


def test_a_synchronized_reference_is_not_rounded(xla, models):
    """One that was frozen by hand, and that bfloat16 holds at first."""
    for synced, dtype in ((SYNCED, torch.float32), ({}, torch.bfloat16)):
        trainer = trainer_for(Case("dpo", {"bf16": True, **synced}, reference=False), models, ours=True)
        trainer.ref_model.requires_grad_(False)
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        with trainer.frozen_in_bfloat16():
            assert trainer.ref_model.lm_head.weight.dtype == dtype


# ---- Layers as one loop ----


LOOPS = {
    "dpo-full": Case("dpo", evaluates=True),
    "dpo-lora": Case("dpo", ACCUMULATED, lora="new", evaluates=True),
    "dpo-lora-given": Case("dpo", lora="given"),
    "dpo-precomputed": Case("dpo", {"precompute_ref_log_probs": True}),
    "dpo-synced": Case("dpo", SYNCED),
    "kto-lora": Case("kto", lora="new", evaluates=True),
    "kto-full": Case("kto"),
    "reward-lora": Case("reward", lora="new", evaluates=True),
    "reward-full": Case("reward", evaluates=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_layers_as_one_loop_train_as_upstreams(xla, models, tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(layers, "_LEAST_LAYERS", 4)
    case = replace(LOOPS[name], model_config={"num_hidden_layers": 4}, steps=8)
    trainer = trainer_for(case, models, ours=True)
    trainer.train()
    assert trainer.layers.stack is not None and trainer.watch.recompiles == 0
    assert_same_numbers(case, trainer.state.log_history, train(case, models, ours=False).state.log_history)
