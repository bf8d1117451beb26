"""Training with splash attention, interpreted by XLA on the host, equals upstream's trainer on eager CPU."""

import re

import pytest

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers import TPUSFTConfig


ROWS = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 5, "eval_strategy": "epoch"}


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """Of a width that the kernel takes."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=64)
    return {
        "qwen3": make_model(tmp_path_factory.mktemp("qwen3"), num_key_value_heads=1, **sizes),
        "mistral": make_model(
            tmp_path_factory.mktemp("mistral"), "mistral", num_key_value_heads=2, sliding_window=9, **sizes
        ),
        **{
            family: make_model(
                tmp_path_factory.mktemp(family),
                family,
                num_key_value_heads=1,
                sliding_window=9,
                **{**sizes, "num_hidden_layers": 4},
                layer_types=["sliding_attention", "full_attention"] * 2,
            )
            for family in ("gemma3_text", "gpt_oss")
        },
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "changes", "compiled"),
    [
        ("qwen3", {"packing": True}, {"scan_layers": "on"}),
        pytest.param("qwen3", {}, {"scan_layers": "on", "rematerialization": "dots"}, marks=pytest.mark.slow),
        pytest.param("mistral", {"gradient_checkpointing": False}, {}, marks=pytest.mark.slow),
        pytest.param("mistral", {}, {"scan_layers": "off", "rematerialization": "dots"}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"packing": True}, {"scan_layers": "on"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"router_aux_loss_coef": 0.0}, {"scan_layers": "on"}, marks=pytest.mark.slow),
        pytest.param(
            "gpt_oss",
            {"router_aux_loss_coef": 0.0},
            {"scan_layers": "on", "rematerialization": "dots"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["packed-scan-full", "scan-dots", "window-none", "window-dots", "alternating", "sinks", "sinks-dots"],
)
def test_same_numbers_and_counts(runs, wide_heads, same_logs, capsys, model, changes, compiled):
    runs.model_dir = wide_heads[model]
    reference = runs.stock(**ROWS, **changes)
    trainer = runs.ours(config_cls=TPUSFTConfig, train=False, attention="splash", **compiled, **ROWS, **changes)
    assert trainer.model.config._attn_implementation == "splash"
    trainer.train()
    same_logs(trainer, reference)
    evaluations = sum("eval_loss" in entry for entry in trainer.state.log_history)
    executions = ROWS["max_steps"] + evaluations * len(trainer.get_eval_dataloader())
    summary = re.search(r"(\d+) executions .* 0 CPU fallbacks", capsys.readouterr().out)
    assert int(summary[1]) == executions


@pytest.mark.slow
def test_lora_in_bfloat16_stays_near(runs, wide_heads):
    """With autocast, where eager attention rounds scores and the kernel does not."""
    runs.model_dir = wide_heads["qwen3"]
    lora = {"target_modules": "all-linear"}
    slices = runs.ours(config_cls=TPUSFTConfig, lora=lora, bf16=True, **ROWS)
    splash = runs.ours(config_cls=TPUSFTConfig, lora=lora, bf16=True, attention="splash", **ROWS)
    for before, now in zip(slices.state.log_history, splash.state.log_history, strict=True):
        if "loss" in before:
            assert now["loss"] == pytest.approx(before["loss"], rel=2e-3)
