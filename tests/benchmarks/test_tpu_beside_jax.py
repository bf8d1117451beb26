import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tpu_beside_jax import CASES, compile_jax
from transformers import AutoConfig, AutoModelForCausalLM


SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "qwen3": SIZES | {"head_dim": 64, "tie_word_embeddings": True},
    "qwen2": SIZES,
    "gemma3_text": SIZES | {"head_dim": 64, "num_hidden_layers": 8, "sliding_window": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_step_in_jax_is_that_of_transformers(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    input_ids = torch.randint(0, 512, (2, 256))
    labels = input_ids.clone()
    labels[0, 100:] = -100
    loss = model(input_ids=input_ids, labels=labels).loss
    loss.backward()
    model.save_pretrained(tmp_path)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    save_file({"input_ids": input_ids, "labels": shifted.contiguous()}, tmp_path / "batch.safetensors")

    driver = Path(__file__).with_name("jax_step_driver.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, driver, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert json.loads(done.stdout) == pytest.approx([loss.item(), norm.item()], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=["one chip", "eight chips"])
def test_the_step_in_jax_compiles_for_tpu(case, tmp_path):
    small = replace(case, sizes=MODELS["qwen3"] | {"head_dim": 128})
    program = compile_jax(small, tmp_path)
    assert sum(program.cycles.values()) > 0 and program.temporary_bytes > 0
    # Forward twice, and backward: products of the blocks of scores on and below the diagonal, of each head.
    flops = (2 * 2 + 4 + 3) * 2 * (4 * 4) * (3 * 512**2) * 128 * 2
    assert program.kernel_cycles == pytest.approx(flops / 197e12 * 1.5e9, rel=0.01)
    assert {"attention", "head", "adapters", "optimizer"} <= program.cycles.keys()
