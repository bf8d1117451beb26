import pytest

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost, Exchange
from hf_tpu_ext.plan.programs import Argument, TracedProgram
from hf_tpu_ext.plan.result import estimate_time


EIGHT = find_topology("v5e-8")


def cost(cycles=0, memory_bytes=0, link_bytes=0, kernel_flops=0):
    exchanges = [Exchange("all-gather", 1, link_bytes, link_bytes)]
    return Cost(cycles, memory_bytes, exchanges, [], kernel_flops)


@pytest.mark.parametrize(
    ("done", "seconds"),
    [
        # At 1.5 GHz. The chips at the corners have two links of 50 GB/s.
        (cost(15 * 10**8, 10**9, 10**10), (1, 1.1)),
        (cost(15 * 10**8, 2 * 819 * 10**9, 10**10), (2, 2)),
        (cost(15 * 10**8, 819 * 10**9, 3 * 100 * 10**9), (3, 4)),
        # The compiler has no estimate of kernels.
        (cost(15 * 10**8, kernel_flops=197 * 10**12), (2, 2)),
    ],
    ids=["cycles", "HBM", "interconnect", "kernels"],
)
def test_what_to_expect(done, seconds):
    assert estimate_time([(done, 1)], EIGHT).seconds == pytest.approx(seconds)


def test_programs_run_one_after_the_other():
    time = estimate_time([(cost(cycles=15 * 10**8), 3), (cost(memory_bytes=819 * 10**9), 1)], EIGHT)
    assert (time.cycles, time.memory, time.seconds) == (pytest.approx(3), pytest.approx(1), pytest.approx((3, 3)))


def test_one_chip_has_no_links():
    assert estimate_time([(cost(15 * 10**8), 1)], find_topology("v5e-1")).links == 0


@pytest.mark.parametrize(
    ("sharding", "share"),
    [
        (None, 1),
        ("{replicated}", 1),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", 8),
        ("{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", 4),
    ],
)
def test_what_a_chip_keeps_of_a_traced_program(sharding, share):
    arguments = [
        Argument("weights", 16 * 10**9, False, sharding),
        Argument("optimizer state", 10**9, True, "{replicated}"),
        Argument("batch", 9 * 10**9, False),
    ]
    traced = TracedProgram("training step", (32, 1024), b"", arguments, 8)
    assert traced.resident == {"weights": 16 * 10**9 // share, "optimizer state": 10**9, "gradients": 0}
