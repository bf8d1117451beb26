"""
On a GPU: upstream's numbers, those of the eager CPU where upstream has none, and resuming bit for bit. Skipped where there is no
GPU; `make test-gpu` runs this, and every recipe.
"""

import os

import pytest
import torch
from datasets import Dataset
from processes_driver import KINDS, LEARNS, SAVES, TAUGHT, assert_same, build, in_processes, of_test, taught_rows
from test_images import ImageRuns, make_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.quantization.rounding import Rounding
from hf_tpu_ext.trainers.checkpoint.verification import find_damage


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

AS_UPSTREAM = {
    **KINDS,
    "sft in bfloat16": dict(max_steps=3, bf16=True, gradient_checkpointing=True),
    "packed": dict(max_steps=3, packing=True, max_length=64),
    "qlora": dict(max_steps=3, qlora=True, lora={}, bf16=True),
}
#: After an update, the last bit of a weight decides which of two integers it is rounded to.
ROUNDED = dict(LEARNS, max_steps=1, qat_weight_dtype="int4", qat_group_size=16)
#: Of float32 on a GPU and on a CPU, whose sums have another order, after an update by Adam or two.
OF_A_CPU = 1e-4


@pytest.fixture(scope="module")
def trained(wide_model, teacher, tmp_path_factory):
    """What was noted of each training on the GPU, and its directory."""
    directory = tmp_path_factory.mktemp("gpu")
    taught_rows().to_json(directory / "data" / "train.jsonl")
    spec = {"cache": build(directory, wide_model, teacher, directory / "data", use_cpu=False), **TAUGHT}
    for name, config in AS_UPSTREAM.items():
        spec |= {name: config, f"stock {name}": dict(config, ours=False)}
    spec |= {
        "whole": SAVES,
        "stopped": dict(SAVES, stop_at=3, save_strategy="no"),
        "resumed": dict(SAVES, dir="stopped", resume=True, save_strategy="no"),
        "rounded": ROUNDED,
    }
    noted, _ = in_processes(
        of_test(spec, teacher, directory / "cache"), wide_model, directory, count=1, backend="cuda"
    )
    return noted[0], directory


@pytest.fixture(scope="module")
def on_cpu(wide_model, teacher, tmp_path_factory):
    """What was noted of trainings on the eager CPU, for which upstream has no trainer."""
    directory = tmp_path_factory.mktemp("cpu")
    taught_rows().to_json(directory / "data" / "train.jsonl")
    spec = {"cache": build(directory, wide_model, teacher, directory / "data"), **TAUGHT}
    spec["rounded"] = ROUNDED
    noted, _ = in_processes(of_test(spec, teacher, directory / "cache"), wide_model, directory, count=1)
    return noted[0]


@pytest.mark.parametrize("name", AS_UPSTREAM)
def test_trains_as_with_upstreams_trainer(trained, name):
    """The same numbers in each log, and the same bits of each weight."""
    mine, stock = trained[0][name], trained[0][f"stock {name}"]
    assert mine["device"] == stock["device"] == "cuda"
    assert_same(mine["log"], stock["log"], rel=0)
    assert mine["weights"] == stock["weights"]


@pytest.mark.parametrize("name", [*TAUGHT, "rounded"])
def test_learns_as_on_the_eager_cpu(trained, on_cpu, name):
    assert trained[0][name]["device"] == "cuda" and on_cpu[name]["device"] == "cpu"
    assert_same(trained[0][name]["log"], on_cpu[name]["log"], rel=OF_A_CPU)


@pytest.mark.parametrize("activations", [False, True])
def test_rounds_to_the_integers_of_the_cpu(activations):
    """Where the largest element of a group lies between two integers."""
    rounding = Rounding(4, 16, activations)
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    on_gpu = rounding.quantize_weight(weight.cuda())
    for found, expected in zip(on_gpu, rounding.quantize_weight(weight), strict=True):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(rounding.round_activation(weight.cuda()).cpu(), rounding.round_activation(weight))


def test_batch_is_halved_where_memory_ends(tiny_model, tmp_path):
    """`auto_find_batch_size` with an out-of-memory of CUDA, as with upstream's trainer."""
    rows = Dataset.from_dict({"input_ids": [[5] * 512] * 256})

    def find(trainer_cls, config_cls, name):
        args = config_cls(
            str(tmp_path / name),
            per_device_train_batch_size=256,
            auto_find_batch_size=True,
            num_train_epochs=1,
            max_length=512,
            report_to="none",
        )
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        trainer = trainer_cls(model, args, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        return trainer.state.train_batch_size, trainer.state.global_step

    # For some rows of 512 tokens and 259 logits, not for 256.
    torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = find(TPUSFTTrainer, TPUSFTConfig, "ours")
        assert found == find(SFTTrainer, SFTConfig, "stock") and 1 < found[0] < 256
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "smolvlm"])
def test_images_train_as_with_upstreams_trainer(family, tmp_path):
    runs, rows = ImageRuns(tmp_path), make_rows([1, 2, 1, 1])
    losses = []
    for trainer_cls, config_cls in ((TPUSFTTrainer, TPUSFTConfig), (SFTTrainer, SFTConfig)):
        trainer = runs.trainer(trainer_cls, config_cls, family, rows)
        trainer.train()
        assert trainer.model.device.type == "cuda"
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 4


def test_signal_stops_a_run_that_goes_on_bit_for_bit(trained):
    noted, directory = trained
    assert noted["stopped"]["stopped"] == [os.EX_TEMPFAIL, "SIGTERM", str(directory / "stopped/checkpoint-3"), 3]
    assert find_damage(directory / "stopped" / "checkpoint-3") is None
    assert noted["resumed"]["weights"] == noted["whole"]["weights"]
    assert_same(noted["resumed"]["log"][:-1], noted["whole"]["log"][:-1], rel=0)
