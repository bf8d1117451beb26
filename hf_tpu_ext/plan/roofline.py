"""Roofline of a graph on a chip, and what to expect."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..hardware.topologies import Topology
from .hlo_cost import Cost


#: Share of a chip's peak that tuned training programs were published to reach: dense models of 16 to 128 billion parameters on
#: 256 to 8,192 chips of TPU v5e, github.com/google/maxtext, MaxText/configs/v5e.
EFFICIENCY = (0.46, 0.67)
BASIS = (
    "46 % to 67 % of peak, which MaxText publishes for tuned programs on v5e; fast: compute, HBM and collectives overlap; slow: they do not. "
    "Not measured with this package."
)
#: What can bound a step.
BOUNDS = ("compute", "HBM", "interconnect")


@dataclass(frozen=True)
class Roofline:
    """
    The least seconds that a chip needs for something, by what limits it: matrix products at the peak rate, memory
    traffic at full bandwidth, sending over the links of the chip that has fewest; and the least of all, of each
    program the longest of the three.
    """

    arithmetic: float
    memory: float
    links: float
    seconds: float

    @property
    def wall(self) -> str:
        """What bounds the step: one of [`BOUNDS`]."""
        return max(zip((self.arithmetic, self.memory, self.links), BOUNDS, strict=True))[1]

    @property
    def expected_seconds(self) -> tuple[float, float]:
        """A range for what to expect, fast and slow. [`BASIS`] says what it rests on."""
        slow, fast = EFFICIENCY
        return self.seconds / fast, (self.arithmetic + self.memory + self.links) / slow


def measure_roofline(costs: Iterable[tuple[Cost, float]], topology: Topology) -> Roofline:
    """
    Bound the time of programs that run one after the other, given the cost of each on a chip and how often it runs.
    """
    chip, exchange = topology.chip, topology.exchange_bytes_per_second
    arithmetic = memory = links = seconds = 0.0
    for cost, runs in costs:
        times = (
            cost.matrix_flops / chip.flops_per_second,
            cost.memory_bytes / chip.memory_bytes_per_second,
            cost.link_bytes / exchange if cost.link_bytes else 0.0,
        )
        arithmetic, memory, links = (
            total + runs * time for total, time in zip((arithmetic, memory, links), times, strict=True)
        )
        seconds += runs * max(times)
    return Roofline(arithmetic, memory, links, seconds)
