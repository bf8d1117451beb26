"""The estimate beside what libtpu 0.0.21 made, for v5e, of optimizer steps that the trainer traced with torch_xla 2.9."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tpu_plans import LORA, Case, plan  # noqa: E402

from hf_tpu_ext.plan.memory_estimate import estimate_memory  # noqa: E402
from hf_tpu_ext.step.estimate import Dimensions, count_lora_parameters  # noqa: E402


# The sizes of Qwen3-0.6B, and others, with more or fewer layers.
QWEN3 = Dimensions(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True)
OTHER = replace(QWEN3, hidden=896, intermediate=4864, heads=14, kv_heads=2)
# Model, layers, batch shape, rank of LoRA, what is computed again, further settings; MB at the peak.
LOOP, ACCUMULATES, SLICED = {"layers_in_loop": True}, {"accumulates": True}, {"sliced_attention": True}
COMPILED = [
    (QWEN3, 28, (4, 1024), None, "full", LOOP, 10783),
    (QWEN3, 8, (4, 1024), None, "full", LOOP, 5413),
    (QWEN3, 8, (4, 512), None, "full", LOOP, 4764),
    (QWEN3, 8, (4, 1024), None, "full", LOOP | SLICED, 4976),
    (OTHER, 12, (8, 512), None, "full", LOOP | SLICED, 5899),
    (QWEN3, 8, (4, 1024), 8, "full", LOOP, 1460),
    (QWEN3, 8, (4, 1024), 8, "full", LOOP | SLICED, 1019),
    (QWEN3, 28, (4, 1024), 8, "full", LOOP | SLICED, 2050),
    (QWEN3, 28, (16, 512), 8, "full", LOOP | SLICED, 2941),
    (QWEN3, 6, (4, 2048), 16, "full", LOOP | SLICED, 1597),
    (OTHER, 24, (4, 1024), 8, "full", LOOP | SLICED, 1847),
    (QWEN3, 4, (4, 1024), None, "full", {}, 4267),
    (QWEN3, 8, (4, 1024), None, "full", {}, 5231),
    (QWEN3, 4, (4, 1024), None, "full", SLICED, 3643),
    (QWEN3, 4, (4, 1024), None, "full", ACCUMULATES, 5241),
    (QWEN3, 4, (4, 1024), 8, "full", {}, 1634),
    (QWEN3, 4, (4, 1024), 8, "full", SLICED, 1097),
    (QWEN3, 4, (4, 1024), None, "none", {}, 5389),
    (QWEN3, 4, (4, 1024), 8, "none", {}, 3038),
    (QWEN3, 4, (4, 1024), 8, "none", SLICED, 1736),
]


def adapters(dimensions, rank):
    return None if rank is None else count_lora_parameters(dimensions, rank)


@pytest.mark.parametrize(("model", "layers", "shape", "rank", "policy", "settings", "megabytes"), COMPILED)
def test_within_15_percent_of_the_compiler(model, layers, shape, rank, policy, settings, megabytes):
    dimensions = replace(model, layers=layers)
    estimate = estimate_memory(dimensions, shape, adapters(dimensions, rank), policy, **settings)
    assert estimate.peak_bytes / 1e6 == pytest.approx(megabytes, rel=0.15)


# What a recipe's own settings lead to: attention in slices.
DEFAULTS = [case for case in COMPILED if "sliced_attention" in case[5]]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layers", "shape", "rank", "policy", "settings", "megabytes"), DEFAULTS)
def test_the_compiler_still_makes_what_is_written_here(
    tmp_path, model, layers, shape, rank, policy, settings, megabytes
):
    recipe = {
        "per_device_train_batch_size": str(shape[0]),
        "rematerialization": policy,
        "scan_layers": "on" if "layers_in_loop" in settings else "off",
    }
    if rank is not None:
        recipe |= LORA | {"lora_r": str(rank)}
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
    }
    planned, _ = plan(Case("", "Qwen3-0.6B", length=shape[1], settings=recipe, sizes=sizes), tmp_path)
    assert planned["derived"]["fits"]
    assert planned["derived"]["peak_bytes"] / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_what_stays_on_a_chip_is_exact():
    parts = estimate_memory(QWEN3, (4, 1024)).parts
    # Float32: four bytes of a weight, eight of its moments.
    assert (parts["weights"], parts["optimizer state"]) == (4 * 596_049_920, 8 * 596_049_920)
    assert parts["gradients of layers"] == 4 * 28 * 15_730_944
    parts = estimate_memory(QWEN3, (4, 1024), 5_046_272).parts
    assert (parts["weights"], parts["optimizer state"]) == (2 * 596_049_920 + 4 * 5_046_272, 8 * 5_046_272)


def test_a_longer_batch_needs_more_and_rematerialization_less():
    def peak(shape, policy="full"):
        return estimate_memory(QWEN3, shape, 5_046_272, policy).peak_bytes

    assert peak((4, 512)) < peak((4, 1024)) < peak((8, 1024)) < peak((8, 1024), "none")
    # Scores grow with the square of the length, unless they are never there at once.
    assert peak((1, 4096)) > peak((4, 1024))
    long, short = (estimate_memory(QWEN3, shape, 5_046_272, sliced_attention=True) for shape in ((1, 4096), (4, 1024)))
    # But for the mask.
    assert long.parts.pop("attention mask") > short.parts.pop("attention mask")
    assert long == short


@pytest.mark.parametrize(("policy", "in_loop"), [("dots", False), ("mlp", True), ("none", True)])
def test_what_it_does_not_describe_is_not_known(policy, in_loop):
    assert estimate_memory(QWEN3, (4, 1024), None, policy, in_loop) is None
