"""Rounded and quantized weights with torch_tpu: the numbers of eager CPU, whole, by layers and by operators."""

import pytest
import torch
from test_torch_tpu_compiled import WHOLE
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_tpu_ext import TPUSFTConfig


ALL_LINEAR = {"target_modules": "all-linear"}
# A rate at which no last bit decides about an integer.
INT4 = dict(config_cls=TPUSFTConfig, qat_weight_dtype="int4", qat_group_size=16, max_steps=6, learning_rate=1e-5)
LAYERS, OPERATORS = dict(gradient_checkpointing=True), dict(compile_step="off")


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (None, dict(WHOLE, eval_strategy="steps", eval_steps=3)),
        (None, dict(WHOLE, qat_scale="mse", gradient_accumulation_steps=2)),
        (None, dict(WHOLE, qat_activation_dtype="int8", qat_quantize_embedding=True)),
        (ALL_LINEAR, WHOLE),
        (ALL_LINEAR, dict(WHOLE, qat_adapters="beside")),
        (ALL_LINEAR, LAYERS),
        (None, OPERATORS),
    ],
    ids=["whole", "searched", "activations", "inside", "beside", "layers", "operators"],
)
def test_the_numbers_are_those_of_eager_cpu(runs, same_logs, lora, config):
    torch.compiler.reset()
    config = INT4 | config
    ours = runs.ours(lora=lora, max_recompiles=0, **config)
    eager = dict(backend="cpu", dataloader_pin_memory=False, compile_step="auto")
    same_logs(ours, runs.ours(lora=lora, **{**config, **eager}))


@pytest.mark.parametrize("config", [WHOLE, LAYERS], ids=["whole", "layers"])
def test_rounds_after_some_steps(runs, as_trainer, same_logs, config):
    torch.compiler.reset()
    config = INT4 | config | dict(qat_group_size=8, qat_fake_quant_after_n_steps=3)
    ours = runs.ours(max_recompiles=0, **config)
    eager = dict(backend="cpu", dataloader_pin_memory=False, compile_step="auto")
    same_logs(ours, runs.ours(**{**config, **eager}))
    plain = runs.ours(
        **{**config, "qat_weight_dtype": None, "qat_group_size": 32, "qat_fake_quant_after_n_steps": None}
    )
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (ours, plain)]
    assert losses[0][:3] == losses[1][:3]
    assert losses[0][3] != pytest.approx(losses[1][3], rel=1e-4)


NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
FP4 = dict(load_in_4bit=True, bnb_4bit_quant_type="fp4")
INT8 = dict(load_in_8bit=True)


@pytest.mark.parametrize(
    ("settings", "config"),
    [(NF4, WHOLE), (NF4, LAYERS), (FP4, OPERATORS), (INT8, WHOLE)],
    ids=["nf4-whole", "nf4-layers", "fp4-operators", "int8-whole"],
)
def test_quantized_weights_give_the_losses_of_bitsandbytes(runs, tmp_path, settings, config):
    """TRL keeps the adapters of quantized models in bfloat16: the order of a sum decides how some of them are rounded."""
    pytest.importorskip("bitsandbytes")
    from hf_tpu_ext.examples.tiny import make_model

    torch.compiler.reset()
    directory = make_model(tmp_path / "wide", hidden_size=64, intermediate_size=128, num_hidden_layers=2)

    def load():
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**settings)
        )

    more = dict(max_steps=6, max_grad_norm=0.0, learning_rate=5e-4)
    ours = runs.ours(model=load(), lora=ALL_LINEAR, max_recompiles=0, **{"config_cls": TPUSFTConfig, **config, **more})
    checkpoints = config.get("gradient_checkpointing", True)
    stock = runs.stock(model=load(), lora=ALL_LINEAR, gradient_checkpointing=checkpoints, **more)
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (ours, stock)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
