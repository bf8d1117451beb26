"""Rounded and quantized weights with torch_tpu: the numbers of eager CPU, whole, by layers and by operators."""

import pytest
import torch
from test_torch_tpu_compiled import WHOLE
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_tpu_ext import TPUSFTConfig


ALL_LINEAR = {"target_modules": "all-linear"}
INT4 = dict(config_cls=TPUSFTConfig, qat_weight_dtype="int4", qat_group_size=16, max_steps=6, warmup_steps=0)
LAYERS, OPERATORS = dict(gradient_checkpointing=True), dict(compile_step="off")


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.fixture
def on_cpu(runs):
    """Trains on the eager CPU, with weights that are multiplied by a number."""

    def train(scale=1.0, **config):
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        return runs.ours(
            model=model, **{**config, "backend": "cpu", "dataloader_pin_memory": False, "compile_step": "auto"}
        )

    return train


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (None, WHOLE),
        (None, dict(WHOLE, qat_scale="mse", gradient_accumulation_steps=2)),
        (None, dict(WHOLE, qat_activation_dtype="int8", qat_quantize_embedding=True)),
        (ALL_LINEAR, WHOLE),
        (ALL_LINEAR, dict(WHOLE, qat_adapters="beside")),
        (ALL_LINEAR, LAYERS),
        (None, OPERATORS),
    ],
    ids=["whole", "searched", "activations", "inside", "beside", "layers", "operators"],
)
def test_the_numbers_are_those_of_eager_cpu(runs, on_cpu, lora, config):
    """From the second step on, a last bit decides about integers: as far apart as runs are whose weights differ in it."""
    torch.compiler.reset()
    config = INT4 | config | dict(lora=lora)
    ours, eager, other = runs.ours(max_recompiles=0, **config), on_cpu(**config), on_cpu(1 + 2**-23, **config)
    # Rounded activations are between two integers here and there.
    near = 1e-4 if "qat_activation_dtype" in config else 1e-6
    assert logged(ours)[0] == pytest.approx(logged(eager)[0], rel=near)
    assert logged(ours, "grad_norm")[0] == pytest.approx(logged(eager, "grad_norm")[0], rel=100 * near)
    floor = max(abs(a / b - 1) for a, b in zip(logged(eager), logged(other), strict=True))
    assert logged(ours) == pytest.approx(logged(eager), rel=max(5 * floor, 1e-5))


@pytest.mark.parametrize("config", [WHOLE, LAYERS], ids=["whole", "layers"])
def test_rounds_after_some_steps(runs, on_cpu, config):
    torch.compiler.reset()
    config = INT4 | config | dict(qat_group_size=8, qat_fake_quant_after_n_steps=3)
    ours, eager = runs.ours(max_recompiles=0, **config), on_cpu(**config)
    plain = runs.ours(
        **{**config, "qat_weight_dtype": None, "qat_group_size": 32, "qat_fake_quant_after_n_steps": None}
    )
    assert logged(ours)[:3] == pytest.approx(logged(eager)[:3], rel=1e-5)
    assert logged(ours)[3] == pytest.approx(logged(eager)[3], rel=1e-3)
    assert logged(ours)[:3] == logged(plain)[:3]
    assert logged(ours)[3] != pytest.approx(logged(plain)[3], rel=1e-4)


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
    assert logged(ours)[0] == pytest.approx(logged(stock)[0], rel=1e-6)
    assert logged(ours) == pytest.approx(logged(stock), abs=1e-4)
