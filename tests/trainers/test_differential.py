"""Drawn user code trains as with upstream's trainer: every logged number, with default settings and step by step."""

import datasets
import pytest
import torch
from differential import Run, as_before, difference, draw_case, draw_preferences
from differential_models import PREFERENCES
from preference import OURS, STOCK
from transformers import AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.examples.tiny import make_tokenizer
from hf_tpu_ext.step import running_code
from hf_tpu_ext.step.fingerprint import Fingerprint
from hf_tpu_ext.trainers.run import layers, programs
from hf_tpu_ext.trainers.run.batches import BatchesMixin
from hf_tpu_ext.trainers.run.layers import LayerScan


SEEDS, BY_DEFAULT, IN_CI = 300, 2, 3
PREFERENCE_SEEDS = 100
STEP_BY_STEP = dict(step_replay=False, scan_layers="off")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def train(xla, tokenizer, tmp_path, monkeypatch):
    # Two layers are a loop by default: eight take minutes to compile one by one, as often as drawn code wants it.
    monkeypatch.setattr(layers, "_LEAST_LAYERS", 2)
    # Of log-probs of references.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def train(case, ours, dtype=torch.float32, **settings):
        run = Run(case, dtype)
        given = {"output_dir": str(tmp_path), **run.arguments(), **settings}
        if ours:
            given["run_report"] = False
        if case.family in PREFERENCES:
            trainer_cls, config_cls = (OURS if ours else STOCK)[case.family]
            kwargs = {"processing_class": tokenizer, **run.more()}
            if not ours:
                given.pop("length_buckets", None)
        elif case.family == "sft":
            trainer_cls, config_cls = (TPUSFTTrainer, TPUSFTConfig) if ours else (SFTTrainer, SFTConfig)
            kwargs = {"processing_class": tokenizer}
        else:
            trainer_cls, config_cls = (TPUTrainer, TPUTrainingArguments) if ours else (Trainer, TrainingArguments)
            kwargs = {}
        with as_before():
            run.train(trainer_cls, config_cls(**given), **kwargs)
        return run

    return train


def check(train, case):
    reference = train(case, ours=False, use_cpu=True)
    for settings in ({}, STEP_BY_STEP):
        run = train(case, ours=True, **settings)
        found = difference(run, reference)
        if found is not None and case.family in PREFERENCES:
            # Sums of many log-probs are rounded: which of the two is wrong?
            found = difference(run, reference, train(case, ours=False, dtype=torch.float64, use_cpu=True))
        assert found is None, f"{found}, with {settings or 'default settings'}\n{case}"


@pytest.mark.parametrize(
    "seed",
    [
        *range(BY_DEFAULT),
        *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(BY_DEFAULT, IN_CI)),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(IN_CI, SEEDS)),
    ],
)
def test_users_code_trains_as_upstreams(train, seed):
    check(train, draw_case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PREFERENCE_SEEDS))
def test_preferences_train_as_upstreams(train, seed):
    check(train, draw_preferences(seed))


# ---- What it finds ----


def freeze_python(monkeypatch):
    """Steps are replayed whatever code of the user's is in them."""
    monkeypatch.setattr(programs, "find_own_code", lambda *args, **kwargs: None)
    monkeypatch.setattr(running_code, "is_of_library", lambda module: True)
    monkeypatch.setattr(Fingerprint, "_change_of_python", lambda self: None)


def complete_every_batch(monkeypatch):
    monkeypatch.setattr(BatchesMixin, "why_not_padded", lambda self, *args, **kwargs: None)


def keep_the_loop(monkeypatch):
    """Code of the user's sees the layers as one."""
    monkeypatch.setattr(LayerScan, "_own_code_allows_scan", lambda self: True)
    monkeypatch.setattr(
        LayerScan,
        "_call_event",
        lambda self, handler, call_event, event, *args, **kwargs: call_event(event, *args, **kwargs),
    )


@pytest.mark.parametrize(
    "break_it, seed",
    [
        (freeze_python, 22),
        (complete_every_batch, 7),
        # A loop over layers is one of XLA's.
        pytest.param(keep_the_loop, 8, marks=[pytest.mark.torch_xla, pytest.mark.ci]),
    ],
)
def test_a_mend_that_is_missing_is_found(train, monkeypatch, break_it, seed):
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="with default settings"):
        check(train, draw_case(seed))
