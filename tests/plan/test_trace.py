"""The programs of a plan are those of the run."""

import json
import os
import sys
from pathlib import Path

import forked
import pytest
from transformers import AutoConfig

from hf_tpu_ext.examples.tiny import make_model, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned") / "model"
    # Blocks of quantized weights are along rows of 64.
    make_model(directory, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    return directory


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned") / "model"
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=6, layer_types=types, sliding_window=9)
    make_model(directory, "gemma3_text", **sizes)
    return directory


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One whose weights, of 512 MiB, are those of its embedding, without these."""
    directory = tmp_path_factory.mktemp("planned") / "model"
    sizes = dict(hidden_size=256, intermediate_size=64, num_hidden_layers=2, head_dim=32, vocab_size=2**19)
    config = AutoConfig.for_model("qwen3", **sizes, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    config.save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@pytest.fixture
def programs(model, alternating, wide, tmp_path):
    """Gives the programs of a run, by `"train"` or `"trace"`."""

    def run(how, settings):
        settings = dict(settings)
        directory = {"alternating": alternating, "wide": wide}.get(settings.pop("model", None), model)
        output = tmp_path / f"{how}.json"
        done = forked.run(
            [
                sys.executable,
                Path(__file__).with_name("trace_driver.py"),
                how,
                directory,
                output,
                json.dumps(settings),
            ],
            env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(settings.get("chips", 1))},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(output.read_text())

    return run


LORA = {"r": 4, "lora_dropout": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2, "lora": LORA, "bf16": True, "ema_decay": 0.9},
        {
            "quantized": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            "lora": LORA,
            "scan_layers": "on",
        },
        {"quantized": {"load_in_8bit": True}, "lora": LORA},
        {"chips": 8, "mesh": "data=2,fsdp=4", "lora": LORA},
        {"bf16": False, "scan_layers": "on", "max_grad_norm": 0.5},
        {"chips": 8, "mesh": "data", "gradient_accumulation_steps": 2},
        {"chips": 4, "mesh": "fsdp", "rematerialization": "dots"},
        {"model": "alternating", "lora": LORA, "scan_layers": "on", "chips": 4, "mesh": "fsdp"},
    ],
    ids=lambda settings: "-".join(f"{key}={value}" for key, value in settings.items() if key != "lora"),
)
def test_traced_for_a_plan_is_what_is_trained(programs, settings):
    trained, traced = programs("train", settings), programs("trace", settings)
    assert len(traced["programs"]) == (2 if "gradient_accumulation_steps" in settings else 1)
    assert traced["donated"] == trained["donated"]
    assert all(traced["donated"])
    for (text, shardings), (trained_text, trained_shardings) in zip(
        traced["programs"], trained["programs"], strict=True
    ):
        assert text == trained_text
        assert shardings == trained_shardings


def test_a_plan_takes_no_memory_for_weights_gradients_or_moments(programs):
    settings = {"model": "wide", "chips": 8, "gradient_accumulation_steps": 2, "ema_decay": 0.9, "bf16": True}
    traced = programs("trace", settings)
    assert traced["bytes"] < 2**28
