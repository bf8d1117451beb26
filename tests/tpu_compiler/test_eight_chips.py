from collections import Counter

import pytest
from schemes import SCHEMES

from hf_tpu_ext.plan.hlo import find_collectives, parse_module
from hf_tpu_ext.plan.hlo_cost import measure_cost
from hf_tpu_ext.step.train_step import MICRO_STEP, OPTIMIZER_STEP


pytestmark = pytest.mark.slow

# What the compiler for v5e lets a program have.
CHIP_BYTES = 15.75 * 2**30
FULLY_SHARDED = [
    ("fsdp", OPTIMIZER_STEP),
    ("fsdp_accumulated", MICRO_STEP),
    ("fsdp_accumulated", OPTIMIZER_STEP),
    ("fsdp_saving", OPTIMIZER_STEP),
]


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (name, kind)
        for name, scheme in SCHEMES.items()
        for kind in ([MICRO_STEP] if scheme.gradient_accumulation_steps > 1 else []) + [OPTIMIZER_STEP]
    ],
)
def test_compiles_and_updates_in_place(compile_for_tpu, scheme, kind):
    program = compile_for_tpu(scheme, kind)
    counts = Counter(item.kind for item in find_collectives(parse_module(program.text)))
    print(f"collectives: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    memory = program.memory
    assert sum(memory.values()) - 2 * memory["alias"] < CHIP_BYTES
    assert memory["alias"] > 0.95 * memory["output"]


@pytest.mark.parametrize("kind", [MICRO_STEP, OPTIMIZER_STEP])
def test_fully_sharded_holds_a_part(compile_for_tpu, kind):
    split = compile_for_tpu("fsdp_accumulated", kind).memory["argument"]
    assert split < compile_for_tpu("data_accumulated", kind).memory["argument"] / 7


@pytest.mark.parametrize("scheme", ["data", "data_accumulated", "data_accumulated_lora"])
def test_data_parallel_reduces_each_gradient_once_per_optimizer_step(compile_for_tpu, runs, scheme):
    for kind in [MICRO_STEP, OPTIMIZER_STEP] if SCHEMES[scheme].gradient_accumulation_steps > 1 else [OPTIMIZER_STEP]:
        found = list(find_collectives(parse_module(compile_for_tpu(scheme, kind).text)))
        reduced = Counter(tensor.num_bytes for item in found for tensor in item.tensors)
        gradients = Counter(p.num_bytes for p in runs[scheme].trainable if kind == OPTIMIZER_STEP)
        assert {size: reduced[size] for size in gradients} == gradients
        # Sums of metrics.
        assert sum(size * count for size, count in (reduced - gradients).items()) < 1000
        assert {item.kind for item in found} == {"all-reduce"}


@pytest.mark.parametrize(("scheme", "kind"), FULLY_SHARDED)
def test_no_gradient_is_whole_on_a_chip(compile_for_tpu, runs, scheme, kind):
    """Each chip gets its part of a sum: by a reduce-scatter, or part by part beside the product that makes the gradient."""
    program = compile_for_tpu(scheme, kind)
    assert program.scatters
    largest_vector = max(parameter.num_bytes for parameter in runs[scheme].parameters if parameter.shards == 1)
    assert max(tensor.num_bytes for item in program.reductions for tensor in item.tensors) <= largest_vector
    parts = [parameter.num_bytes // parameter.shards for parameter in runs[scheme].split]
    moved = [item for item in program.others if item.kind in ("all-to-all", "collective-permute")]
    assert all(tensor.num_bytes <= max(parts) for item in moved for tensor in item.tensors)


@pytest.mark.parametrize("scheme", ["fsdp", "data_fsdp"])
def test_split_weights_are_gathered(compile_for_tpu, runs, scheme):
    # For both passes, unless the compiler keeps a gathered weight from one to the other.
    assert len(compile_for_tpu(scheme, OPTIMIZER_STEP).gathers) >= len(runs[scheme].split)


@pytest.mark.parametrize(("scheme", "kind"), FULLY_SHARDED)
def test_loops_do_not_gather_again(compile_for_tpu, runs, scheme, kind):
    """The head is gathered before the loop over its slices; bytes are those of all turns."""
    exchanges = measure_cost(compile_for_tpu(scheme, kind).text).exchanges
    (gathered,) = (exchange.num_bytes for exchange in exchanges if exchange.kind == "all-gather")
    # Forward, backward, and what the backward pass computes anew.
    assert gathered <= 3 * sum(parameter.num_bytes for parameter in runs[scheme].split)


def test_layers_in_a_loop_gather_each_weight_at_once(compile_for_tpu):
    """Not part by part, each beside its part of a product. The gradients of adapters go together."""
    exchanges = {
        exchange.kind: exchange.count
        for exchange in measure_cost(compile_for_tpu("fsdp_in_a_loop", OPTIMIZER_STEP).text).exchanges
    }
    assert exchanges["all-gather"] and exchanges.get("collective-permute", 0) <= 2
