"""`precompute_ref_log_probs`: upstream's numbers from one graph, kept by what they depend on, and gone on with."""

import re

import datasets
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_counts import CountPerStep, counted_alone
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from hf_tpu_ext import TPUDPOConfig, TPUDPOTrainer, TPUKTOTrainer
from hf_tpu_ext.trainers.preference import reference_log_probs


def texts(count, seed):
    return [chr(ord("a") + (index * 7 + seed) % 26) * (3 + (index * 5 + seed) % 15) for index in range(count)]


def pairs(count=22):
    return Dataset.from_dict({"prompt": texts(count, 0), "chosen": texts(count, 1), "rejected": texts(count, 2)})


def unpaired(count=22):
    labels = [index % 3 != 0 for index in range(count)]
    return Dataset.from_dict({"prompt": texts(count, 0), "completion": texts(count, 1), "label": labels})


@pytest.fixture
def make(xla, runs, tmp_path, monkeypatch):
    """Makes a trainer, whose log-probs are kept in a directory of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def make(cls, config_cls, dataset, lora=False, seed=0, model=(), scale=1.0, **config):
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32, **dict(model))
        model.model.norm.weight.data.mul_(scale)
        torch.manual_seed(seed)
        peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
        return cls(
            model=model,
            args=runs.config(config_cls, precompute_ref_log_probs=True, **{"warmup_steps": 0, **config}),
            train_dataset=dataset,
            eval_dataset=dataset.select(range(7)),
            processing_class=runs.tokenizer,
            peft_config=peft_config if lora else None,
        )

    return make


def reference_steps(trainer):
    return [shape for kind, shape in trainer.watch.programs if kind == "reference step"]


def files(tmp_path):
    return sorted((tmp_path / "cache" / "reference_log_probs").rglob("*.arrow"))


@pytest.mark.parametrize(
    ("ours", "stock", "config_cls", "dataset", "settings"),
    [
        (TPUDPOTrainer, DPOTrainer, DPOConfig, pairs(), {"ld_alpha": 0.5, "precompute_ref_batch_size": 3}),
        (TPUKTOTrainer, KTOTrainer, KTOConfig, unpaired(), {}),
        (TPUKTOTrainer, KTOTrainer, KTOConfig, unpaired(), {"loss_type": "apo_zero_unpaired", "lora": True}),
    ],
    ids=["dpo", "kto", "kto-without-kl"],
)
def test_log_probs_are_upstreams(ours, stock, config_cls, dataset, settings, make, tmp_path):
    """Of every row, that of the last batch included, which has fewer."""
    trainer = make(ours, config_cls, dataset, **settings)
    reference = make(stock, config_cls, dataset, use_cpu=True, **settings)
    for mine, other in (
        (trainer.train_dataset, reference.train_dataset),
        (trainer.eval_dataset, reference.eval_dataset),
    ):
        assert mine.column_names == other.column_names and len(mine) == len(other)
        columns = [name for name in other.column_names if name.startswith("ref_")]
        assert columns
        for name in columns:
            # Sums over the tokens of a row, each of about 5.
            assert mine[name] == pytest.approx(other[name], rel=1e-6), name
    # Training and evaluation have batches of the same size here, and one graph.
    assert len(reference_steps(trainer)) == 1 and trainer.watch.recompiles == 0
    assert len(files(tmp_path)) == 2


@pytest.mark.ci
def test_training_beside_them_is_upstreams(make):
    """With LoRA, whose adapters are drawn before training: one execution a step, without the reference."""
    settings = {"lora": True, "max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 6}
    reference = make(DPOTrainer, DPOConfig, pairs(), use_cpu=True, **settings)
    reference.train()
    trainer = make(TPUDPOTrainer, TPUDPOConfig, pairs(), **settings)
    counted = CountPerStep(trainer.backend)
    trainer.add_callback(counted)
    trainer.train()
    for mine, other in zip(trainer.state.log_history[:-1], reference.state.log_history[:-1], strict=True):
        numbers = {key: value for key, value in other.items() if "runtime" not in key and "per_second" not in key}
        assert {key: mine[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-5)
    # After the last step come two batches of an evaluation.
    places = counted_alone(trainer.backend, counted.steps)
    assert set(places) >= {3, 4}
    assert [counted.steps[place].executions for place in places] == [[1, 1, 1, 1, 1, 1 + 2][place] for place in places]
    assert not any(counted.steps[place].reads for place in places if place % 2 == 0)


def test_the_start_and_the_record_tell_what_it_took(make, tmp_path):
    """The end of a run, which counts from its first step on, leaves it out."""
    dataset = pairs()
    dataset.info.dataset_name = "preferences"
    trainer = make(TPUDPOTrainer, TPUDPOConfig, dataset)
    lines = [line for line in trainer.adapted.changes if line.startswith("reference log-probs")]
    where = re.escape(str(tmp_path / "cache" / "reference_log_probs"))
    for line, words in zip(lines, ["train dataset: 22 rows", "eval dataset: 7 rows"], strict=True):
        assert re.fullmatch(
            rf"reference log-probs of the {words} computed in [\d.]+ s, \d graphs? compiled in [\d.]+ s, kept in {where}/\w+",
            line,
        )
    record = trainer.describe_run(trainer.args, None)
    assert set(lines) <= set(record["facts"]["changes"])
    assert (record["datasets"]["train_dataset"], record["rows"]["train_dataset"]) == ("preferences", 22)


def test_what_was_computed_is_found_again(make, tmp_path, capsys):
    make(TPUDPOTrainer, DPOConfig, pairs(), lora=True, seed=1)
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    # An adapter that was drawn otherwise is none of the reference.
    again = make(TPUDPOTrainer, DPOConfig, pairs(), lora=True, seed=2)
    assert reference_steps(again) == []
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path)} == before
    assert any("reference log-probs of the train dataset were found in" in line for line in again.adapted.changes)
    # Rows of a dataset that comes later, too.
    assert again.evaluate(pairs().select(range(7)))["eval_loss"] == again.evaluate()["eval_loss"]
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path)} == before


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 32},
        {"truncation_mode": "keep_end"},
        {"ld_alpha": 0.5},
        {"bf16": True},
        {"lora": False},
        {"model": {"rms_norm_eps": 0.1}},
        {"scale": 1.001},
    ],
    ids=str,
)
def test_what_they_depend_on_is_in_the_key(changes, make, tmp_path):
    make(TPUDPOTrainer, DPOConfig, pairs(8), lora=True)
    before = files(tmp_path)
    assert reference_steps(make(TPUDPOTrainer, DPOConfig, pairs(8), **{"lora": True, **changes}))
    assert len(files(tmp_path)) == 2 * len(before)


def test_rows_of_the_same_length_are_others(make, tmp_path):
    make(TPUDPOTrainer, DPOConfig, pairs(8), lora=True)
    before = files(tmp_path)
    others = pairs(8).map(lambda row: {"chosen": row["chosen"].swapcase()})
    assert reference_steps(make(TPUDPOTrainer, DPOConfig, others, lora=True))
    assert len(files(tmp_path)) == 2 * len(before)


def test_a_killed_run_goes_on(make, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_log_probs, "_BATCHES_OF_A_FILE", 1)
    write, written = reference_log_probs.write_atomically, []

    def stop_after_three(path, data):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        write(path, data)

    monkeypatch.setattr(reference_log_probs, "write_atomically", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        make(TPUDPOTrainer, DPOConfig, pairs())
    left = files(tmp_path)
    assert [path.name for path in left] == ["0-4.arrow", "4-8.arrow", "8-12.arrow"]
    monkeypatch.setattr(reference_log_probs, "write_atomically", write)
    before = {path: path.stat().st_mtime_ns for path in left}
    trainer = make(TPUDPOTrainer, DPOConfig, pairs())
    assert {path: path.stat().st_mtime_ns for path in left} == before
    assert len(trainer.train_dataset["ref_chosen_logps"]) == 22
