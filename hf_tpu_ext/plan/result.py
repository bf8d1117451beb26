"""A plan: what is known of a run before it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from ..generation.generator import DECODE, PREFILL
from ..hardware.prices import Price
from ..hardware.topologies import Topology
from ..step.train_step import MICRO_STEP, OPTIMIZER_STEP
from ..trainers.online.rewarded import OF_EVALUATION
from ..trainers.preference.reference_log_probs import REFERENCE_STEP
from .hlo_cost import Cost
from .programs import CompiledProgram, Generations, find_state


@dataclass(frozen=True)
class Estimate:
    """
    The seconds of programs that run one after the other on a chip: `cycles`, as the compiler estimates them, which has no
    collectives, with `kernels` at the peak rate; `memory`, their traffic at the chip's full bandwidth, which long decoding
    is bound by; and `links`, what they send over the links of the chip that has fewest.
    """

    cycles: float
    kernels: float
    memory: float
    links: float

    @property
    def seconds(self) -> tuple[float, float]:
        """What to expect: with collectives that go on beside the rest, and with collectives after it."""
        return max(self.cycles, self.memory, self.links), max(self.cycles + self.links, self.memory)


def estimate_time(costs: Iterable[tuple[Cost, float]], topology: Topology) -> Estimate:
    """
    Estimate the time of programs that run one after the other, from the cost of each on a chip and how often it runs.
    """
    chip, exchange = topology.chip, topology.exchange_bytes_per_second
    cycles = kernels = memory = links = 0.0
    for cost, runs in costs:
        in_kernels = cost.kernel_flops / chip.flops_per_second
        cycles += runs * (cost.cycles / chip.clock_hz + in_kernels)
        kernels += runs * in_kernels
        memory += runs * cost.memory_bytes / chip.memory_bytes_per_second
        links += runs * cost.link_bytes / exchange if cost.link_bytes else 0.0
    return Estimate(cycles, kernels, memory, links)


@dataclass(frozen=True)
class Trial:
    """
    A variant of the run that was compiled as well: what is different by name of the setting, whether it fits (`None`:
    it could not be told), the expected time of an optimizer step and tokens per second and chip in that time, or why that
    is not known. Of a variant that the compiler refused, the memory is what it says. `no_batch_fits` where one row is too many.
    """

    settings: dict[str, str]
    fits: bool | None
    peak_bytes: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None
    no_batch_fits: bool = False


@dataclass(frozen=True)
class Plan:
    """
    What is known of a run before it.

    Args:
        title (`str`): Which run.
        facts (`dict[str, str]`): What a person should know of it (model, precision, ...), in the order of the page.
        topology ([`Topology`]): The TPU.
        programs (`list[CompiledProgram]`): Its programs. None, where the compiler is missing.
        versions (`dict[str, str]`): Versions of the packages that made the plan.
        parameters (`tuple[int, int]`, *optional*): Parameters of the model, and how many of them are trained.
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`): Micro-steps of an optimizer step.
        optimizer_steps (`int`, *optional*): Optimizer steps of the run.
        token_share (`float`, *optional*): Share of tokens that are not padding.
        generations ([`Generations`], *optional*): How often completions are generated.
        price ([`Price`], *optional*): What a chip costs.
        trials (`list[Trial]`, *optional*): Variants that are worth it, of those that were tried.
        advice (`list[str]`, *optional*): What to change.
        unknown (`list[str]`, *optional*): What could not be found out, besides what a program says.
    """

    title: str
    facts: dict[str, str]
    topology: Topology
    programs: list[CompiledProgram]
    versions: dict[str, str]
    parameters: tuple[int, int] | None = None
    gradient_accumulation_steps: int = 1
    optimizer_steps: int | None = None
    token_share: float | None = None
    generations: Generations | None = None
    price: Price | None = None
    trials: list[Trial] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def compiled_programs(self) -> list[CompiledProgram]:
        """Programs that the compiler took."""
        return [program for program in self.programs if program.error is None]

    @property
    def fits(self) -> bool | None:
        """Whether every program fits on the chips; `None` if it could not be told."""
        if any(program.out_of_memory for program in self.programs):
            return False
        if not self.programs or len(self.compiled_programs) < len(self.programs):
            return None
        return self.peak_bytes <= self.topology.chip.memory_bytes

    def parts(self, program: CompiledProgram) -> dict[str, int]:
        """
        What a chip holds while a program runs, in bytes and in the order of the page: its own [`CompiledProgram.parts`], what stays on
        the chip although this program does not use it (the optimizer's state during a micro-step), and the code of all programs. Of
        one that the compiler refuses, what it says, which may be nothing and does not tell arguments apart, with what stays besides.
        """
        if program.error is None:
            code = sum(other.memory["generated_code"] for other in self.compiled_programs)
            return program.parts | find_state(self.compiled_programs) | {"generated code": code}
        parts = {}
        if (arguments := program.bytes_said("arguments")) is not None:
            parts["weights, state and batch"] = arguments + self._uncounted_state(program)
        if (activations := program.bytes_said("program")) is not None:
            parts["activations and code"] = activations
        return parts

    def excess_bytes(self, program: CompiledProgram) -> int | None:
        """By how much a program that the compiler refuses does not fit, where it says so, with the state that it has not counted."""
        said = program.bytes_said("Exceeded hbm capacity by")
        return None if said is None else said + self._uncounted_state(program)

    def _uncounted_state(self, program: CompiledProgram) -> int:
        """Bytes that stay on the chip and are not in what the compiler says of a program that it refuses."""
        not_used = sum(find_state(self.programs).values()) - sum(program.resident.values())
        return not_used + program.uncounted_bytes

    @property
    def largest(self) -> CompiledProgram | None:
        """The program during which a chip holds most, which is one that does not fit, if there is one; `None` if it is not known."""
        out_of_memory = [program for program in self.programs if program.out_of_memory]
        if out_of_memory:
            return max(out_of_memory, key=lambda program: self.excess_bytes(program) or 0)
        if len(self.compiled_programs) < len(self.programs):
            return None
        return max(self.programs, key=lambda program: sum(self.parts(program).values()), default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Most that a chip holds, or where the compiler refused a program and says it, would hold."""
        if self.largest is None:
            return None
        if self.largest.error is None:
            return sum(self.parts(self.largest).values())
        excess = self.excess_bytes(self.largest)
        return None if excess is None else self.topology.chip.memory_bytes + excess

    @property
    def longest(self) -> list[tuple[CompiledProgram, int]]:
        """Training programs of the largest batch, and how often each runs in an optimizer step."""
        training = [program for program in self.programs if program.kind in (MICRO_STEP, OPTIMIZER_STEP)]
        most = max((program.tokens for program in training), default=0)
        runs = {MICRO_STEP: self.gradient_accumulation_steps - 1, OPTIMIZER_STEP: 1}
        return [(program, runs[program.kind]) for program in training if program.tokens == most]

    @property
    def step(self) -> Estimate | None:
        """Time of an optimizer step with the largest batch."""
        return self._estimate(self.longest)

    def _estimate(self, programs: Sequence[tuple[CompiledProgram, float]]) -> Estimate | None:
        if not programs or any(program.cost is None for program, _ in programs):
            return None
        return estimate_time([(program.cost, runs) for program, runs in programs], self.topology)

    @property
    def of_generation(self) -> list[tuple[CompiledProgram, float]]:
        """
        Programs that an optimizer step has besides the training ones, and how often: they generate completions, and compute
        their log-probabilities and rewards. Of each kind that of the longest rows.
        """
        if self.generations is None:
            return []
        longest: dict[str, CompiledProgram] = {}
        for program in self.programs:
            rows, length, *_ = program.batch_shape
            is_training = program.kind in (MICRO_STEP, OPTIMIZER_STEP)
            # An evaluation generates for as many rows as it has.
            if (
                is_training
                or program.kind.endswith(OF_EVALUATION)
                or rows > self.generations.rows
                or (program.kind in (PREFILL, DECODE) and rows != self.generations.rows)
            ):
                continue
            if program.kind not in longest or longest[program.kind].batch_shape[1] < length:
                longest[program.kind] = program
        return [
            (program, self.generations.per_step * self.generations.rows / program.batch_shape[0])
            for program in longest.values()
        ]

    @property
    def generation(self) -> Estimate | None:
        """Time of those programs in an optimizer step."""
        return self._estimate(self.of_generation)

    @property
    def reference_step(self) -> CompiledProgram | None:
        """The program that each row passes once, before training, for its reference log-probabilities: that of the largest batch."""
        steps = [program for program in self.programs if program.kind == REFERENCE_STEP]
        return max(steps, key=lambda program: program.tokens, default=None)

    @property
    def reference(self) -> Estimate | None:
        """Time of that program."""
        return self.reference_step and self._estimate([(self.reference_step, 1)])

    @property
    def tokens_generated(self) -> float:
        """Tokens of the completions of an optimizer step at most, on all chips."""
        return sum(runs * program.tokens for program, runs in self.of_generation if program.kind == DECODE)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step with the largest batch, on all chips, padding included."""
        return sum(runs * program.tokens for program, runs in self.longest)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second and chip in the longest time that is expected."""
        return self.step and self.tokens_per_step / self.step.seconds[1] / self.topology.num_chips

    @property
    def chip_hours_per_million_tokens(self) -> float | None:
        """What training costs, whatever the number of its tokens: chip-hours of a million of them, padding included."""
        return self.step and 1e6 / self.tokens_per_second / 3600

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization in that time: useful arithmetic over what the chips could do in it."""
        if self.step is None or any(program.model_flops is None for program, _ in self.longest):
            return None
        useful = sum(runs * program.model_flops for program, runs in self.longest)
        return useful / (self.topology.num_chips * self.topology.chip.flops_per_second * self.step.seconds[1])

    @property
    def kernel_flops(self) -> int:
        """Arithmetic of the kernels of an optimizer step on a chip."""
        return sum(runs * program.cost.kernel_flops for program, runs in self.longest)

    @property
    def run_seconds(self) -> tuple[float, float] | None:
        """The range that is expected for the time of the run. Every step is taken to have the largest batch."""
        if self.step is None or self.optimizer_steps is None:
            return None
        beside = (0.0, 0.0) if self.generation is None else self.generation.seconds
        return tuple(self.optimizer_steps * sum(seconds) for seconds in zip(self.step.seconds, beside, strict=True))

    @property
    def run_dollars(self) -> tuple[float, float] | None:
        """What the chips cost for that time."""
        if self.run_seconds is None or self.price is None:
            return None
        rate = self.price.dollars_per_chip_hour * self.topology.num_chips / 3600
        return tuple(rate * seconds for seconds in self.run_seconds)

    @property
    def unknowns(self) -> list[str]:
        """All that could not be found out."""
        reasons = [reason for program in self.compiled_programs for reason in program.cost.unknown]
        return list(dict.fromkeys([*self.unknown, *reasons]))

    def to_json(self) -> str:
        """All of it as JSON, with the derived figures under `"derived"`."""
        estimates = (
            "fits peak_bytes tokens_per_step tokens_per_second chip_hours_per_million_tokens mfu run_seconds run_dollars "
            "tokens_generated unknowns"
        )
        values = {name: getattr(self, name) for name in estimates.split()}
        for name, estimate in (("step", self.step), ("generation", self.generation), ("reference", self.reference)):
            values[name] = estimate and asdict(estimate) | {"seconds": estimate.seconds}
        values["parts"] = self.largest and self.parts(self.largest)
        plan = asdict(self, dict_factory=lambda items: {name: value for name, value in items if name != "text"})
        return json.dumps(plan | {"derived": values}, indent=2)
