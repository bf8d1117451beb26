from dataclasses import replace

import pytest

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost, Exchange
from hf_tpu_ext.plan.result import measure_roofline


EIGHT = find_topology("v5e-8")


def cost(matrix_flops=0, memory_bytes=0, link_bytes=0):
    return Cost(matrix_flops, memory_bytes, [Exchange("all-gather", 1, link_bytes, link_bytes)], [])


@pytest.mark.parametrize(
    ("done", "bound", "seconds"),
    [
        (cost(197 * 10**12, 10**9, 10**9), "compute", 1),
        (cost(197 * 10**12, 2 * 819 * 10**9, 10**9), "HBM", 2),
        # The chips at the corners have two links of 50 GB/s.
        (cost(197 * 10**12, 819 * 10**9, 3 * 100 * 10**9), "interconnect", 3),
    ],
)
def test_what_bounds_a_step(done, bound, seconds):
    roofline = measure_roofline([(done, 1)], EIGHT)
    assert (roofline.wall, roofline.seconds) == (bound, pytest.approx(seconds))


def test_programs_one_after_the_other_have_bounds_of_their_own():
    micro, closing = cost(matrix_flops=197 * 10**12), cost(memory_bytes=819 * 10**9)
    roofline = measure_roofline([(micro, 3), (closing, 1)], EIGHT)
    assert (roofline.arithmetic, roofline.memory, roofline.seconds) == pytest.approx((3, 1, 4))


def test_what_to_expect_is_what_the_compiler_estimates():
    done = replace(
        cost(197 * 10**12, link_bytes=100 * 10**9), cycles={"matrix products": 3 * 10**9, "elementwise": 15 * 10**8}
    )
    roofline = measure_roofline([(done, 2)], EIGHT)
    # At 1.5 GHz; collectives, of which the compiler says nothing, beside it or after it.
    assert roofline.expected_seconds == pytest.approx((2 * 3, 2 * (3 + 1)))
    # Kernels have no estimate, either: it takes no less than the bound.
    roofline = measure_roofline([(cost(197 * 10**12), 1)], EIGHT)
    assert roofline.expected_seconds == pytest.approx((1, 1))


def test_one_chip_has_no_links():
    assert measure_roofline([(cost(197 * 10**12), 1)], find_topology("v5e-1")).links == 0
