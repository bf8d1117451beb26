from collections import Counter

import pytest
from collectives import CLOSING_STEP, MICRO_STEP
from hlo import parse_collectives


pytestmark = pytest.mark.slow

# What the compiler for v5e lets a program have.
CHIP_BYTES = 15.75 * 2**30


def collectives(program):
    """Of the operations that are parts of one exchange, one."""
    return list({item.channel_id: item for item in parse_collectives(program.text)}.values())


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("data_accumulated", MICRO_STEP),
        ("data_accumulated", CLOSING_STEP),
        ("fsdp_accumulated", MICRO_STEP),
        ("fsdp_accumulated", CLOSING_STEP),
        ("data_fsdp", CLOSING_STEP),
    ],
)
def test_compiles_and_updates_in_place(compile_for_tpu, scheme, kind):
    program = compile_for_tpu(scheme, kind)
    counts = Counter(item.kind for item in collectives(program))
    print(f"collectives: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    memory = program.memory
    assert sum(memory.values()) - memory["alias"] < CHIP_BYTES
    assert memory["alias"] > 0.95 * memory["output"]


@pytest.mark.parametrize("kind", [MICRO_STEP, CLOSING_STEP])
def test_fully_sharded_holds_a_part(compile_for_tpu, kind):
    split = compile_for_tpu("fsdp_accumulated", kind).memory["argument"]
    assert split < compile_for_tpu("data_accumulated", kind).memory["argument"] / 5


def test_data_parallel_reduces_each_gradient_once_per_optimizer_step(compile_for_tpu, train_on_host):
    micro, closing = (compile_for_tpu("data_accumulated", kind) for kind in (MICRO_STEP, CLOSING_STEP))
    # Sums of metrics, as one number of each chip.
    assert sum(item.num_bytes for item in collectives(micro)) < 1000
    assert {item.kind for item in collectives(closing)} == {"all-reduce"}
    reduced = Counter(tensor.num_bytes for item in collectives(closing) for tensor in item.tensors)
    gradients = Counter(parameter.num_bytes for parameter in train_on_host("data_accumulated").trainable)
    assert {size: reduced[size] for size in gradients} == gradients
    assert sum(size * count for size, count in (reduced - gradients).items()) < 1000


@pytest.mark.parametrize(("scheme", "kind"), [("fsdp_accumulated", MICRO_STEP), ("data_fsdp", CLOSING_STEP)])
def test_split_weights_are_gathered(compile_for_tpu, train_on_host, scheme, kind):
    gathers = [item for item in collectives(compile_for_tpu(scheme, kind)) if item.kind == "all-gather"]
    # For both passes, unless the compiler keeps a gathered weight from one to the other.
    assert len(gathers) >= len(train_on_host(scheme).split)
