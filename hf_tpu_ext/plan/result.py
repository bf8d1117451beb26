"""A plan: what is known of a run before it."""

import json
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..atomic_write import write_atomically
from ..generation.generator import DECODE, PREFILL
from ..hardware.prices import Price
from ..hardware.topologies import Topology
from ..step.train_step import MICRO_STEP, OF_EVALUATION, OPTIMIZER_STEP
from .hlo_cost import Cost
from .hlo_parts import ATTENTION
from .programs import KEPT, CompiledProgram, Generations


#: What can bound a step.
BOUNDS = ("compute", "HBM", "interconnect")
#: A program of more arithmetic than this many times the analytic figure deserves a second look.
FLOPS_RATIO = 1.1


@dataclass(frozen=True)
class Roofline:
    """
    The least seconds that a chip needs for something, by what limits it: matrix products at the peak rate, memory
    traffic at full bandwidth, sending over the links of the chip that has fewest; and the least of all, of each
    program the longest of the three. `cycles` is the time of the cycles that the compiler estimates, which has no
    collectives, and of kernels, `kernels`, at the peak rate. `hosts` is the part of `links` that goes by the links between
    hosts.
    """

    arithmetic: float
    memory: float
    links: float
    seconds: float
    cycles: float
    kernels: float = 0.0
    hosts: float = 0.0

    @property
    def wall(self) -> str:
        """What bounds the step: one of [`BOUNDS`]."""
        return max(zip((self.arithmetic, self.memory, self.links), BOUNDS, strict=True))[1]

    @property
    def expected_seconds(self) -> tuple[float, float]:
        """What to expect by the compiler's estimate, with collectives beside the arithmetic, and one after the other."""
        return max(self.cycles, self.seconds), max(self.cycles + self.links, self.seconds)


def measure_roofline(costs: Iterable[tuple[Cost, float]], topology: Topology) -> Roofline:
    """
    Bound the time of programs that run one after the other, given the cost of each on a chip and how often it runs.
    """
    chip, exchange = topology.chip, topology.exchange_bytes_per_second
    between_hosts = topology.host_exchange_bytes_per_second
    arithmetic = memory = links = seconds = cycles = kernels = hosts = 0.0
    for cost, runs in costs:
        in_kernels = cost.kernel_flops / chip.flops_per_second
        across = cost.host_bytes / between_hosts if cost.host_bytes else 0.0
        times = (
            cost.matrix_flops / chip.flops_per_second + in_kernels,
            cost.memory_bytes / chip.memory_bytes_per_second,
            max(cost.link_bytes / exchange if cost.link_bytes else 0.0, across),
        )
        arithmetic, memory, links = (
            total + runs * time for total, time in zip((arithmetic, memory, links), times, strict=True)
        )
        seconds += runs * max(times)
        kernels += runs * in_kernels
        hosts += runs * across
        cycles += runs * (sum(cost.cycles.values()) / chip.clock_hz + in_kernels)
    return Roofline(arithmetic, memory, links, seconds, cycles, kernels, hosts)


@dataclass(frozen=True)
class Trial:
    """
    A variant of the run that was compiled as well: what is different by name of the setting, whether it fits (`None`:
    it could not be told), the expected time of an optimizer step and tokens per second and chip in that time, or why that
    is not known. Of a variant that the compiler refused, the memory is what it says.
    """

    settings: dict[str, str]
    fits: bool | None
    peak_bytes: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Plan:
    """
    What is known of a run before it.

    Args:
        title (`str`):
            Which run.
        facts (`dict[str, str]`):
            What a person should know of it (model, precision, ...), in the order of the page.
        topology ([`Topology`]):
            The TPU.
        programs (`list[CompiledProgram]`):
            Its programs. None, where the compiler is missing.
        versions (`dict[str, str]`):
            Versions of the packages that made the plan.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-steps of an optimizer step.
        optimizer_steps (`int`, *optional*):
            Optimizer steps of the run.
        token_share (`float`, *optional*):
            Share of tokens that are not padding.
        generations ([`Generations`], *optional*):
            How often completions are generated.
        price ([`Price`], *optional*):
            What a chip costs.
        trials (`list[Trial]`, *optional*):
            Variants that are worth it, of those that were tried.
        advice (`list[str]`, *optional*):
            What to change.
        unknown (`list[str]`, *optional*):
            What could not be found out, besides what a program says.
    """

    title: str
    facts: dict[str, str]
    topology: Topology
    programs: list[CompiledProgram]
    versions: dict[str, str]
    gradient_accumulation_steps: int = 1
    optimizer_steps: int | None = None
    token_share: float | None = None
    generations: Generations | None = None
    price: Price | None = None
    trials: list[Trial] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def compiled(self) -> list[CompiledProgram]:
        """Programs that the compiler took."""
        return [program for program in self.programs if program.error is None]

    @property
    def fits(self) -> bool | None:
        """Whether every program fits on the chips; `None` if it could not be told."""
        if any(program.out_of_memory for program in self.programs):
            return False
        if not self.programs or len(self.compiled) < len(self.programs):
            return None
        return self.peak_bytes <= self.topology.chip.memory_bytes

    @property
    def excess_bytes(self) -> int | None:
        """By how much a chip has too little, where the compiler refused a program and says it."""
        told = (program.excess_bytes for program in self.programs)
        return max((excess for excess in told if excess is not None), default=None)

    def parts(self, program: CompiledProgram) -> dict[str, int]:
        """
        What a chip holds while a compiled program runs, in bytes, as [`CompiledProgram.parts`]: its own, what stays on the
        chip although this program does not use it (the optimizer's state during a micro-step), and the code of all
        programs.
        """
        kept = {role: max(other.parts[role] for other in self.compiled) for role in KEPT}
        code = sum(other.parts["generated code"] for other in self.compiled)
        return program.parts | kept | {"generated code": code}

    @property
    def largest(self) -> CompiledProgram | None:
        """The compiled program during which a chip holds most."""
        return max(self.compiled, key=lambda program: sum(self.parts(program).values()), default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Most that a chip holds."""
        return None if self.largest is None else sum(self.parts(self.largest).values())

    @property
    def longest(self) -> list[tuple[CompiledProgram, int]]:
        """Training programs of the largest batch, and how often each runs in an optimizer step."""
        training = [program for program in self.programs if program.kind in (MICRO_STEP, OPTIMIZER_STEP)]
        most = max((program.tokens for program in training), default=0)
        runs = {MICRO_STEP: self.gradient_accumulation_steps - 1, OPTIMIZER_STEP: 1}
        return [(program, runs[program.kind]) for program in training if program.tokens == most]

    @property
    def roofline(self) -> Roofline | None:
        """Least time of an optimizer step with the largest batch."""
        if not self.longest or any(program.cost is None for program, _ in self.longest):
            return None
        return measure_roofline([(program.cost, runs) for program, runs in self.longest], self.topology)

    @property
    def of_generation(self) -> list[tuple[CompiledProgram, float]]:
        """
        Programs that an optimizer step has besides the training ones, and how often: they generate completions, and compute
        their log-probabilities and rewards. Of each kind that of the longest rows.
        """
        if self.generations is None:
            return []
        found: dict[str, CompiledProgram] = {}
        for program in self.programs:
            rows, length = program.batch_shape
            is_training = program.kind in (MICRO_STEP, OPTIMIZER_STEP)
            # An evaluation generates for as many rows as it has.
            if (
                is_training
                or program.kind.endswith(OF_EVALUATION)
                or rows > self.generations.rows
                or (program.kind in (PREFILL, DECODE) and rows != self.generations.rows)
            ):
                continue
            if program.kind not in found or found[program.kind].batch_shape[1] < length:
                found[program.kind] = program
        return [
            (program, self.generations.per_step * self.generations.rows / program.batch_shape[0])
            for program in found.values()
        ]

    @property
    def generation_roofline(self) -> Roofline | None:
        """Least time of those programs in an optimizer step."""
        programs = self.of_generation
        if not programs or any(program.cost is None for program, _ in programs):
            return None
        return measure_roofline([(program.cost, runs) for program, runs in programs], self.topology)

    @property
    def tokens_generated(self) -> float:
        """Tokens of the completions of an optimizer step at most, on all chips."""
        return sum(runs * program.tokens for program, runs in self.of_generation if program.kind == DECODE)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step with the largest batch, on all chips, padding included."""
        return sum(runs * program.tokens for program, runs in self.longest)

    @property
    def expected_tokens_per_second(self) -> float | None:
        """Tokens per second and chip in the longest time that is expected."""
        return self.roofline and self.tokens_per_step / self.roofline.expected_seconds[1] / self.topology.num_chips

    @property
    def expected_mfu(self) -> float | None:
        """Model FLOPs utilization in that time."""
        return self.mfu and self.mfu * self.roofline.seconds / self.roofline.expected_seconds[1]

    @property
    def cycle_shares(self) -> dict[str, float]:
        """
        Which share of the cycles of an optimizer step each part of the model, or kind of instruction, takes, largest first.
        Attention has those of kernels.
        """
        cycles: Counter[str] = Counter()
        for program, runs in self.longest:
            cycles.update({kind: runs * number for kind, number in program.cost.cycles.items()})
        chip = self.topology.chip
        cycles[ATTENTION] += round(self.kernel_flops / chip.flops_per_second * chip.clock_hz)
        total = cycles.total()
        return {kind: number / total for kind, number in cycles.most_common() if number}

    @property
    def kernel_flops(self) -> int:
        """Arithmetic of the kernels of an optimizer step on a chip."""
        return sum(runs * program.cost.kernel_flops for program, runs in self.longest)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second and chip at the bound."""
        return self.roofline and self.tokens_per_step / self.roofline.seconds / self.topology.num_chips

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization at the bound: useful arithmetic over what the chips could do in that time."""
        if self.roofline is None or any(program.model_flops is None for program, _ in self.longest):
            return None
        useful = sum(runs * program.model_flops for program, runs in self.longest)
        peak = self.topology.num_chips * self.topology.chip.flops_per_second
        return useful / (peak * self.roofline.seconds)

    @property
    def flops_ratio(self) -> float | None:
        """Matrix arithmetic of the compiled programs of a step over the analytic figure."""
        if self.roofline is None or any(program.expected_flops is None for program, _ in self.longest):
            return None
        done = self.kernel_flops + sum(runs * program.cost.matrix_flops for program, runs in self.longest)
        done *= self.topology.num_chips
        return done / sum(runs * program.expected_flops for program, runs in self.longest)

    @property
    def run_seconds(self) -> tuple[float, float, float] | None:
        """Time of the run: the bound, and the expected range. Every step is taken to have the largest batch."""
        if self.roofline is None or self.optimizer_steps is None:
            return None
        steps = (self.roofline.seconds, *self.roofline.expected_seconds)
        if (beside := self.generation_roofline) is not None:
            steps = map(operator.add, steps, (beside.seconds, *beside.expected_seconds))
        return tuple(self.optimizer_steps * seconds for seconds in steps)

    @property
    def run_dollars(self) -> tuple[float, float, float] | None:
        """What the chips cost for that time."""
        if self.run_seconds is None or self.price is None:
            return None
        rate = self.price.dollars_per_chip_hour * self.topology.num_chips / 3600
        return tuple(rate * seconds for seconds in self.run_seconds)

    @property
    def unknowns(self) -> list[str]:
        """All that could not be found out."""
        told = [reason for program in self.compiled for reason in program.cost.unknown]
        return list(dict.fromkeys([*self.unknown, *told]))

    def to_json(self) -> str:
        """All of it as JSON, with the derived figures under `"derived"`."""
        derived = (
            "fits peak_bytes tokens_per_step tokens_per_second mfu expected_tokens_per_second expected_mfu flops_ratio "
            "run_seconds run_dollars tokens_generated unknowns"
        ).split()
        values = {name: getattr(self, name) for name in derived}
        for name, roofline in (("roofline", self.roofline), ("generation_roofline", self.generation_roofline)):
            values[name] = roofline and asdict(roofline) | {
                "wall": roofline.wall,
                "expected_seconds": roofline.expected_seconds,
            }
        values["parts"] = self.largest and self.parts(self.largest)
        plan = asdict(self, dict_factory=lambda items: {name: value for name, value in items if name != "text"})
        return json.dumps(plan | {"derived": values}, indent=2)

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file, which is whole or not there."""
        write_atomically(path, self.to_json())
