"""What is noted of an adapter's base is the same wherever it was trained, and tells another base from it."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers.checkpoint.base_record import BASE_FILE, find_differences, find_frozen, write_base


@pytest.fixture(scope="module")
def tiny_model(two_layer_model):
    """Layers are a loop in some of the tests."""
    return two_layer_model


@pytest.fixture
def base(runs):
    return AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)


def count_weights(model):
    return len(list(model.parameters()))


@pytest.mark.parametrize(
    "config",
    [
        dict(backend="cpu"),
        dict(backend="xla"),
        # Frozen weights are kept in bfloat16 where that is exact, and layers are stacked.
        dict(backend="xla", bf16=True, gradient_checkpointing=True, scan_layers="on"),
    ],
    ids=["eager", "xla", "xla, stacked"],
)
def test_every_backend_notes_the_same(runs, base, config, tmp_path):
    settings = dict(max_steps=1, save_strategy="steps", save_steps=1, **config)
    trainer = runs.ours(config_cls=TPUSFTConfig, lora={}, **settings)
    trainer.save_model()
    noted = [runs.output_dir / BASE_FILE, runs.output_dir / "checkpoint-1" / BASE_FILE]
    assert len({path.read_text() for path in noted}) == 1
    names = {name for name, _ in base.named_parameters()}
    write_base(tmp_path, base.name_or_path, {f"base_model.model.{name}": base.get_parameter(name) for name in names})
    expected = json.loads((tmp_path / BASE_FILE).read_text())
    assert json.loads(noted[0].read_text()) == expected and expected["base_model"] == str(runs.model_dir)
    assert find_differences(runs.output_dir, base) == (len(names), [])


def test_another_base_differs(runs, base, tmp_path):
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))
    write_base(tmp_path, "base", {name: model.get_parameter(name) for name in find_frozen(model)})
    other = AutoModelForCausalLM.from_pretrained(
        make_model(tmp_path / "other", hidden_size=32, intermediate_size=48, num_hidden_layers=2, seed=3)
    )
    compared, differing = find_differences(tmp_path, other)
    # Norms begin alike.
    assert compared == count_weights(other) and len(differing) >= 14
    again = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    assert find_differences(tmp_path, again) == (compared, [])
    with torch.no_grad():
        again.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert find_differences(tmp_path, again) == (compared, ["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_base_may_be_trained_on_in_another_dtype(runs, base, dtype, tmp_path):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=dtype), LoraConfig(target_modules=["q_proj"])
    )
    write_base(tmp_path, "base", {name: model.get_parameter(name) for name in find_frozen(model)})
    assert find_differences(tmp_path, base) == (count_weights(base), [])


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 0),
        ({"target_modules": ["q_proj"], "bias": "all"}, 0),
        # Takes the adapter's part off the weight that it is on.
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, 2),
        ({"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}, 0),
        ({"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}, 0),
    ],
    ids=["modules_to_save", "bias", "pissa", "gaussian", "orthogonal"],
)
def test_what_training_changes_is_left_out(base, runs, settings, left_out, tmp_path):
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    write_base(tmp_path, "base", {name: model.get_parameter(name) for name in find_frozen(model)})
    again = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    assert find_differences(tmp_path, again) == (count_weights(again) - left_out, [])


def test_what_is_not_noted_is_not_compared(base, tmp_path):
    assert find_frozen(base) == []
    assert find_differences(tmp_path, base) is None
    write_base(tmp_path, "base", {"base_model.model.lm_head.weight": torch.zeros(3, 4)})
    assert find_differences(tmp_path, base) is None
    for text in ("", "[]", "{}", '{"weights": {"lm_head.weight": {"shape": 1}, "model.norm.weight": 2}}'):
        (tmp_path / BASE_FILE).write_text(text)
        with pytest.raises(ValueError, match="base_model.json is damaged"):
            find_differences(tmp_path, base)
