"""Layers that alternate, as one loop over their pattern: training, checkpoints, counts, and what is built on the loop."""

import pytest
import torch
from preference import Case, assert_same_numbers, trainer_for
from safetensors.torch import load_file
from test_counts import train_and_count
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.layer_list import Pattern


# Gemma 3 as small as it alternates: a local layer twice, then a global one; the last two are left over.
ALTERNATING = dict(
    num_hidden_layers=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2,
    sliding_window=9,
)
PATTERNS = [Pattern(first=0, runs=(2, 1), num_periods=2), Pattern(first=6, runs=(2,), num_periods=1)]
# As many as eight devices can share.
ROWS = dict(per_device_train_batch_size=8, per_device_eval_batch_size=8)
NARROW = dict(hidden_size=32, intermediate_size=48)
# bitsandbytes packs blocks of 64.
WIDE = dict(hidden_size=64, intermediate_size=128, head_dim=32)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    directories = {}

    def write(family="gemma3_text", **sizes):
        sizes = {**NARROW, **(ALTERNATING if family == "gemma3_text" else {}), **sizes}
        key = (family, str(sizes))
        if key not in directories:
            directories[key] = make_model(tmp_path_factory.mktemp(family), model_type=family, **sizes)
        return directories[key]

    return write


@pytest.fixture(scope="module")
def make(directory_of):
    def load(family="gemma3_text", quantized=None, **sizes):
        settings = {} if quantized is None else {"quantization_config": BitsAndBytesConfig(**quantized)}
        return AutoModelForCausalLM.from_pretrained(directory_of(family, **sizes), dtype=torch.float32, **settings)

    return load


@pytest.fixture
def looped(runs):
    def train(model, patterns=PATTERNS, **config):
        trainer = runs.ours(model=model, config_cls=TPUSFTConfig, **{"scan_layers": "on", **config})
        if config.get("train", True):
            stack = trainer.layers.stack
            assert (None if stack is None else stack.patterns) == (
                None if config.get("scan_layers") == "off" else patterns
            )
        return trainer

    return train


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            dict(packing=True, packing_strategy="wrapped", gradient_accumulation_steps=2), marks=pytest.mark.ci
        ),
        pytest.param(dict(lora={}, eval_strategy="steps", eval_steps=2), marks=pytest.mark.slow),
        pytest.param(dict(lora={}, rematerialization="dots"), marks=pytest.mark.slow),
        pytest.param(dict(rematerialization="none"), marks=pytest.mark.slow),
        pytest.param(dict(lora={}, step_replay=False), marks=pytest.mark.slow),
    ],
    ids=lambda config: "-".join(f"{key}={value}" for key, value in config.items()),
)
def test_training_is_upstreams(runs, looped, same_logs, make, config):
    config = {"max_steps": 3, "warmup_steps": 1, **ROWS, **config}
    stock = {key: value for key, value in config.items() if key not in ("rematerialization", "step_replay")}
    same_logs(looped(make(), **config), runs.stock(model=make(), **stock))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "patterns"),
    [
        ("gemma2", dict(num_hidden_layers=4), [Pattern(0, (1, 1), 2)]),
        # Layers of which some have experts.
        ("qwen3_moe", dict(num_hidden_layers=4, decoder_sparse_step=2), [Pattern(0, (1, 1), 2)]),
        # A dense one before those with experts.
        ("qwen3_moe", dict(num_hidden_layers=4, mlp_only_layers=[0]), [Pattern(1, (1,), 3)]),
        # With the load of the experts in the loss.
        ("gpt_oss", dict(num_hidden_layers=4, router_aux_loss_coef=0.5), [Pattern(0, (1, 1), 2)]),
        ("gpt_neox", dict(num_hidden_layers=3), [Pattern(0, (1,), 3)]),
    ],
)
def test_other_patterns_train_as_upstreams(runs, looped, same_logs, make, family, sizes, patterns):
    config = dict(max_steps=3, warmup_steps=1, router_aux_loss_coef=sizes.get("router_aux_loss_coef", 0.0))
    same_logs(looped(make(family, **sizes), patterns, **config), runs.stock(model=make(family, **sizes), **config))


@pytest.mark.slow
def test_a_micro_step_is_one_execution(runs, make):
    trainer, steps = train_and_count(
        runs,
        model=make(),
        lora={"lora_dropout": 0.1},
        gradient_accumulation_steps=2,
        max_steps=5,
        logging_steps=100,
        scan_layers="on",
        **ROWS,
    )
    assert trainer.layers.stack.patterns == PATTERNS
    # An epoch has three batches: its second step has the one that is left.
    assert [step.executions for step in steps[:-1]] == [2, 1, 2, 1]
    assert [step.reads for step in steps[:-1]] == [0] * 4
    assert [step.compiles for step in steps[1:-1]] == [0] * 3
    assert [step.fallbacks for step in steps] == [0] * 5
    assert trainer.watch.recompiles == 0


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_checkpoints_are_those_of_the_layers(looped, same_logs, make, tmp_path, lora):
    """Written by a run of either kind, resumed by a run of either kind."""
    config = dict(max_steps=4, save_strategy="steps", save_steps=2, lora=lora)
    one, other = (
        looped(make(), output_dir=str(tmp_path / scan_layers), scan_layers=scan_layers, **config)
        for scan_layers in ("on", "off")
    )
    same_logs(one, other)
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    weights, expected = (load_file(tmp_path / kind / "checkpoint-2" / name) for kind in ("on", "off"))
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
    for written, scan_layers in (("on", "off"), ("off", "on")):
        settings = {**config, "save_strategy": "no", "scan_layers": scan_layers}
        resumed = looped(make(), output_dir=str(tmp_path / "resumed"), train=False, **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / written / "checkpoint-2"))
        losses, whole = (
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (resumed, other)
        )
        assert losses == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        dict(ema_decay=0.5, eval_strategy="steps", eval_steps=2),
        dict(lora={}, kd_teacher="base", learning_rate=1e-2, warmup_steps=0),
        dict(quantized=dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), lora={"target_modules": "all-linear"}),
        dict(neftune_noise_alpha=5.0),
        dict(bf16=True, lora={}),
    ],
    ids=["ema", "kd", "qlora", "neftune", "bfloat16"],
)
def test_what_is_built_on_layers_has_the_numbers_of_unrolled_ones(looped, same_logs, make, config):
    quantized = config.get("quantized")
    sizes = NARROW if quantized is None else WIDE
    config = {"max_steps": 4, **{key: value for key, value in config.items() if key != "quantized"}}
    tolerance = 1e-5 if quantized is None and "bf16" not in config else 2**-7
    on, off = (
        looped(make(quantized=quantized, **sizes), scan_layers=scan_layers, **config) for scan_layers in ("on", "off")
    )
    same_logs(on, off, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "patterns"),
    [
        ("gemma3_text", {}, PATTERNS),
        # Upstream asks the model for the logits of its routers in each call.
        ("qwen3_moe", {"router_aux_loss_coef": 0.5}, [Pattern(0, (1,), 2)]),
    ],
)
def test_preferences_are_upstreams(make, tmp_path, family, settings, patterns):
    case = Case("dpo", {"beta": 0.3, "scan_layers": "on", **settings}, lora="new", steps=4)
    ours, stock = (trainer_for(case, tmp_path, is_ours, model=make(family)) for is_ours in (True, False))
    for trainer in (ours, stock):
        trainer.train()
    assert ours.layers.stack.patterns == patterns
    assert_same_numbers(case, ours.state.log_history, stock.state.log_history)


@pytest.mark.slow
def test_eight_devices_have_the_numbers_of_one(
    runs, directory_of, make, on_devices, rows, same_logs, as_trainer, tmp_path
):
    common = dict(max_steps=4, warmup_steps=1, per_device_train_batch_size=2, lora={})
    specs = {"data": dict(gradient_accumulation_steps=2), "fsdp": dict(mesh="fsdp")}
    spec = {name: {**common, "scan_layers": "on", **config} for name, config in specs.items()}
    results, _ = on_devices(8, directory_of(), spec, tmp_path)
    for name, config in specs.items():
        one = {**common, "per_device_train_batch_size": 16, **config}
        one.pop("mesh", None)
        stock = runs.stock(model=make(), kwargs={"train_dataset": rows(120)}, **one)
        same_logs(as_trainer(results[name]["log"]), stock)
        assert results[name]["recompiles"] == 0
        executions, _, compiles, fallbacks = zip(*results[name]["steps"], strict=True)
        assert set(executions) == {config.get("gradient_accumulation_steps", 1)}
        assert (sum(compiles[1:]), sum(fallbacks)) == (0, 0)
