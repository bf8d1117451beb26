"""Models that save other names or tensors than they have: what a checkpoint has is what training goes on from."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, TrainingArguments

from hf_tpu_ext import TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.examples.tiny_vision import make_vision_model
from hf_tpu_ext.trainers.checkpoint.resumption import saves_other_weights


def load(path, family):
    auto = AutoModelForCausalLM if "moe" in family or family == "qwen3" else AutoModelForImageTextToText
    return auto.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("config", [TPUTrainingArguments, pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl"])
def test_a_checkpoint_is_loaded_whole(xla, tmp_path, caplog, family, max_shard_size, config):
    make = make_model if "moe" in family else make_vision_model
    path, cpu = make(tmp_path / "model", family), config == "cpu"
    saved = load(path, family)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(torch.randn_like(parameter))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    saved.save_pretrained(checkpoint, max_shard_size=max_shard_size)

    args = (TrainingArguments if cpu else config)(str(tmp_path / "run"), report_to="none", use_cpu=cpu)
    trainer = TPUTrainer(load(path, family), args)
    assert saves_other_weights(trainer.model)
    trainer._load_from_checkpoint(str(checkpoint))
    check_same(trainer.model, saved)

    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.state.best_model_checkpoint = str(checkpoint)
    trainer._load_best_model()
    check_same(trainer.model, saved)
    assert "missing keys" not in caplog.text


def check_same(model, saved):
    expected = dict(saved.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().cpu(), expected[name]), name


def test_most_models_save_what_they_have(tmp_path):
    model = load(make_model(tmp_path), "qwen3")
    assert not saves_other_weights(model) and not saves_other_weights(torch.nn.Linear(2, 2))
