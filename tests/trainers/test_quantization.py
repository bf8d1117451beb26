"""Quantization-aware training: torchao's losses, one program, every teacher, plain checkpoints."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_counts import CountPerStep
from torch import nn
from transformers import AutoModelForCausalLM

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.quantization.fake_quantized import FakeQuantization
from hf_tpu_ext.quantization.rounding import Rounding


INT4 = dict(qat_weight_dtype="int4", qat_group_size=16)
ALL_LINEAR = {"target_modules": "all-linear"}


@pytest.fixture
def train(runs, two_layer_model):
    """Trains a model of one layer, or of two from the first run on in which they are a loop."""

    def train(backend="xla", **config):
        if config.get("scan_layers") == "on":
            runs.model_dir = two_layer_model
        config = {"max_steps": 4, "warmup_steps": 0, "config_cls": TPUSFTConfig, **INT4, **config}
        try:
            return runs.ours(backend=backend, **config)
        finally:
            select_backend("xla")

    return train


def losses(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def load(runs, scale=1.0):
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def prepared_by_torchao(runs, activations=False, scale=1.0):
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from torchao.quantization.qat import QATConfig

    base = IntxWeightOnlyConfig(torch.int4, PerGroup(16))
    if activations:
        base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16))
    model = load(runs, scale)
    quantize_(
        model,
        QATConfig(base, step="prepare"),
        lambda module, name: isinstance(module, nn.Linear) and name != "lm_head",
    )
    return model


@pytest.mark.slow
@pytest.mark.parametrize("activations", [False, True], ids=["weights", "activations"])
def test_upstreams_trainer_with_torchaos_prepared_model(runs, train, activations):
    """From the second step on, a last bit decides about integers: as far apart as runs are whose weights differ in it."""
    pytest.importorskip("torchao")
    config = dict(max_steps=6, warmup_steps=0)
    stock = runs.stock(model=prepared_by_torchao(runs, activations), **config)
    other = runs.stock(model=prepared_by_torchao(runs, activations, scale=1 + 2**-23), **config)
    floor = max(abs(a / b - 1) for a, b in zip(losses(stock), losses(other), strict=True))
    for backend in ("xla", "cpu"):
        ours = train(backend, qat_activation_dtype="int8" if activations else None, **config)
        assert losses(ours)[0] == pytest.approx(losses(stock)[0], rel=1e-4 if activations else 1e-6)
        assert losses(ours, "grad_norm")[0] == pytest.approx(
            losses(stock, "grad_norm")[0], rel=1e-2 if activations else 1e-4
        )
        assert losses(ours) == pytest.approx(losses(stock), rel=max(5 * floor, 1e-5))
    plain = runs.stock(**config)
    assert losses(stock)[0] != pytest.approx(losses(plain)[0], rel=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        dict(),
        pytest.param(dict(qat_scale="mse"), marks=pytest.mark.slow),
        pytest.param(
            dict(
                lora=ALL_LINEAR,
                bf16=True,
                gradient_checkpointing=True,
                scan_layers="on",
                kd_teacher="base",
                qat_scale="mse",
            ),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            dict(
                lora=ALL_LINEAR,
                bf16=True,
                qat_adapters="beside",
                qat_activation_dtype="int8",
                qat_quantize_embedding=True,
                gradient_accumulation_steps=2,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full", "searched", "inside", "beside"],
)
def test_one_execution_per_micro_step_and_no_reads(train, config):
    trainer = train(train=False, max_steps=6, logging_steps=100, max_recompiles=0, **config)
    counter = CountPerStep(trainer.backend)
    trainer.add_callback(counter)
    trainer.train()
    micro_steps = config.get("gradient_accumulation_steps", 1)
    assert [step.executions for step in counter.steps[:-1]] == [micro_steps] * 5
    assert [step.reads for step in counter.steps[:-1]] == [0] * 5
    assert [step.compiles for step in counter.steps[1:-1]] == [0] * 4
    # At least each one that is not the last of an epoch.
    assert [step.replays for step in counter.steps[3:-1]] == [micro_steps] * 2
    assert (trainer.layers.stack is not None) == (config.get("scan_layers") == "on")


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["max", "mse"])
def test_layers_as_a_loop_and_one_by_one(train, scale):
    config = dict(lora=ALL_LINEAR, gradient_checkpointing=True, max_steps=2, qat_scale=scale)
    looped, single = train(scan_layers="on", **config), train(**config)
    assert losses(looped)[0] == pytest.approx(losses(single)[0], rel=1e-6)
    assert losses(looped, "grad_norm")[0] == pytest.approx(losses(single, "grad_norm")[0], rel=1e-4)


@pytest.mark.slow
def test_searched_scales(runs, train):
    """They lose less, and are the same on both backends: the loss before the first update."""
    settings = dict(qat_weight_dtype="int3", max_steps=1)
    searched, eager = (train(backend, qat_scale="mse", **settings) for backend in ("xla", "cpu"))
    assert losses(searched)[0] == pytest.approx(losses(eager)[0], rel=1e-6)
    assert losses(searched, "grad_norm")[0] == pytest.approx(losses(eager, "grad_norm")[0], rel=1e-4)
    settings |= dict(kd_teacher=str(runs.model_dir), kd_alpha=1.0)
    searched, largest = (train(qat_scale=scale, **settings) for scale in ("mse", "max"))
    assert losses(searched, "kd_loss")[0] < 0.8 * losses(largest, "kd_loss")[0]


@pytest.mark.parametrize(
    "adapters", [pytest.param("inside", marks=pytest.mark.ci), pytest.param("beside", marks=pytest.mark.slow)]
)
def test_the_base_that_teaches_is_not_rounded(runs, train, adapters):
    config = dict(lora=ALL_LINEAR, kd_alpha=1.0, qat_adapters=adapters, max_steps=2)
    found = train(kd_teacher="base", **config)
    named = train(kd_teacher=str(runs.model_dir), **config)
    # Of a student that is its teacher, before the first update, rounding alone is the loss.
    assert losses(found, "kd_loss")[0] > 1e-3
    assert losses(found, "kd_loss")[0] == pytest.approx(losses(named, "kd_loss")[0], rel=1e-4)


@pytest.mark.ci
def test_the_original_teaches_all_weights(runs, train):
    assert losses(train(kd_teacher=str(runs.model_dir), max_steps=1), "kd_loss")[0] > 1e-3
    with pytest.raises(ValueError, match="is the student itself"):
        train(kd_teacher=str(runs.model_dir), qat_weight_dtype=None, qat_group_size=32)
    with pytest.raises(ValueError, match="learn from its own base by that name"):
        train(kd_teacher="base")


@pytest.mark.slow
def test_rounds_after_some_steps(runs, train):
    plain = runs.ours(max_steps=6, warmup_steps=0)
    # The program that rounds is expected.
    trainer = train(qat_fake_quant_after_n_steps=3, qat_group_size=8, max_steps=6, max_recompiles=0)
    assert losses(trainer)[:3] == losses(plain)[:3]
    assert losses(trainer)[3] != pytest.approx(losses(plain)[3], rel=1e-4)
    # The first one is that of the run before.
    assert [event.step for event in trainer.watch.events if event.kind == "training step"] == [4]
    eager = train("cpu", qat_fake_quant_after_n_steps=3, qat_group_size=8, max_steps=6)
    assert losses(trainer)[3] == pytest.approx(losses(eager)[3], rel=1e-3)


def test_a_resumed_run_evaluates_as_the_one_that_was_stopped(train):
    config = dict(qat_weight_dtype="int2", qat_fake_quant_after_n_steps=1, eval_strategy="steps", eval_steps=2)
    config |= dict(save_strategy="steps", save_steps=2, max_steps=4, eval_on_start=True)
    whole = train("cpu", **config)
    _, *later = losses(whole, "eval_loss")
    for step, expected in zip((2, 4), later, strict=True):
        resumed = train("cpu", train=False, **config)
        # Before a step, or after the last.
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{step}")
        evaluated = [entry for entry in resumed.state.log_history if "eval_loss" in entry and entry["step"] == step]
        assert [entry["eval_loss"] for entry in evaluated] == [expected] * len(evaluated) and len(evaluated) == 2
    assert resumed.evaluate()["eval_loss"] == later[-1]


def test_a_run_that_never_rounds_says_so(train, caplog):
    train("cpu", max_steps=2, qat_fake_quant_after_n_steps=1)
    assert "qat_fake_quant_after_n_steps" not in caplog.text
    train("cpu", max_steps=2, qat_fake_quant_after_n_steps=2)
    assert "qat_fake_quant_after_n_steps=2 leaves none of the 2 steps of this run" in caplog.text


@pytest.mark.parametrize(
    "scale", [pytest.param("max", marks=pytest.mark.slow), pytest.param("mse", marks=pytest.mark.ci)]
)
@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param(ALL_LINEAR, id="inside")]
)
def test_resumed_bit_for_bit(train, lora, scale):
    config = dict(lora=lora, qat_scale=scale, qat_fake_quant_after_n_steps=1)
    config |= dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole = train(**config)
    weights = whole.backend.fetch(dict(whole.model.state_dict()))
    resumed = train(train=False, **config)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert losses(resumed)[2:] == losses(whole)[2:]
    for name, weight in resumed.backend.fetch(dict(resumed.model.state_dict())).items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.ci
def test_checkpoints_and_the_trained_model_are_plain(runs, train):
    config = dict(
        save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4, qat_quantize_embedding=True
    )
    trainer = train(**config)
    saved = load_file(f"{trainer.args.output_dir}/checkpoint-4/model.safetensors")
    stock = load(runs)
    assert saved.keys() == stock.state_dict().keys()
    assert {name: type(module) for name, module in trainer.model.named_modules() if name} == {
        name: type(module) for name, module in stock.named_modules() if name
    }
    # But an evaluation by the trainer rounds, as in training.
    assert trainer.evaluate()["eval_loss"] == losses(trainer, "eval_loss")[0]
    model = AutoModelForCausalLM.from_pretrained(f"{trainer.args.output_dir}/checkpoint-4", dtype=torch.float32)
    with FakeQuantization(model, Rounding(4, 16), embeddings=True).enable():
        rounded = runs.ours(model=model, train=False, config_cls=TPUSFTConfig, max_steps=1)
        assert rounded.evaluate()["eval_loss"] != losses(trainer, "eval_loss")[0]
    trained = {name: value for name, value in load(runs).state_dict().items() if not torch.equal(value, saved[name])}
    assert len(trained) == len(saved)


@pytest.mark.ci
def test_adapters_and_their_checkpoint(train, tmp_path):
    trainer = train(lora=ALL_LINEAR, save_strategy="steps", save_steps=4)
    saved = load_file(f"{trainer.args.output_dir}/checkpoint-4/adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(trainer.model.base_model.model.name_or_path)
    expected = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **ALL_LINEAR))
    assert len(saved) == sum("lora_" in name for name in expected.state_dict())
    assert all(value.abs().sum() > 0 for value in saved.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            dict(qat_weight_dtype="int9"),
            "Unknown qat_weight_dtype='int9'. Allowed: int2, int3, int4, int5, int6, int7, int8.",
        ),
        (dict(qat_activation_dtype="int4"), "Unknown qat_activation_dtype='int4'. Allowed: int8. Or leave it out"),
        (dict(qat_adapters="outside"), "Unknown qat_adapters='outside'. Allowed: inside, beside."),
        (dict(qat_scale="least"), "Unknown qat_scale='least'. Allowed: max, mse."),
        (dict(qat_group_size=1), "qat_group_size=1 is not at least 2. 32 and 128 are usual: set qat_group_size=32"),
        (dict(qat_fake_quant_after_n_steps=-1), "qat_fake_quant_after_n_steps=-1 is negative."),
        (dict(qat_weight_dtype=None), "qat_group_size=16 has no effect without qat_weight_dtype. Set that as well"),
    ],
)
def test_settings_that_cannot_be(runs, config, message):
    with pytest.raises(ValueError) as error:
        runs.config(TPUSFTConfig, **{**INT4, **config})
    assert message in str(error.value)


def test_a_group_size_that_does_not_divide(train):
    with pytest.raises(
        ValueError, match=r"qat_group_size=32 does not divide the 48 inputs of model.layers.\*.mlp.down_proj"
    ):
        train(qat_group_size=32)


def test_what_has_no_effect_is_said(train):
    lines = train(train=False, qat_adapters="beside").adapted.changes
    assert "qat_adapters='beside' has no effect: there are no adapters (use_peft: true)" in lines
    assert "fake quantization: weights of 7 linear layers in int4, groups of 16" in lines
    lines = train(train=False, qat_scale="mse", lora={**ALL_LINEAR, "lora_dropout": 0.1}).adapted.changes
    assert any("in int4, groups of 16, scales by mse, adapters inside" in line for line in lines)
    assert any(line.startswith("lora_dropout has no effect with qat_adapters='inside'") for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_eight_chips(same_on_eight_chips):
    # Their first update differs in last bits, which then decide about integers.
    common = dict(INT4, max_steps=1)
    same_on_eight_chips(
        {
            "fsdp": dict(common, mesh="fsdp"),
            "searched": dict(common, mesh="fsdp", qat_scale="mse"),
            "inside": dict(
                common, lora=ALL_LINEAR, mesh="data=2,fsdp=4", gradient_checkpointing=True, scan_layers="on"
            ),
        }
    )
