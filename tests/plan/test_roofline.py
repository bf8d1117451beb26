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


def test_what_to_expect_is_slower_than_the_bound_and_at_worst_without_overlap():
    roofline = measure_roofline([(cost(197 * 10**12, 819 * 10**9), 1)], EIGHT)
    fast, slow = roofline.expected_seconds
    assert roofline.seconds < fast < slow
    # The same share of the peak, with one of two walls after the other.
    without_overlap = measure_roofline([(cost(197 * 10**12), 1), (cost(memory_bytes=819 * 10**9), 1)], EIGHT)
    assert slow == pytest.approx(without_overlap.expected_seconds[1])
    assert fast == pytest.approx(without_overlap.expected_seconds[0] / 2)


def test_one_chip_has_no_links():
    assert measure_roofline([(cost(197 * 10**12), 1)], find_topology("v5e-1")).links == 0
