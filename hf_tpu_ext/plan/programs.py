"""What a plan passes from hand to hand: programs as they were traced, and as they were compiled."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .hlo_cost import Cost


#: What stays on a chip between two programs, whether a program uses it or not.
RESIDENT = ("weights", "optimizer state", "gradients")
#: Roles of further arguments, which only programs that generate have.
OF_GENERATION = ("key-value cache", "copies of weights")


@dataclass(frozen=True)
class Argument:
    """
    An argument of a traced program: what it is for (weights, optimizer state, gradients, batch, other), its whole size,
    whether a result takes its place, and how it is split over the chips, as HLO writes it, where the module does not
    say.
    """

    role: str
    num_bytes: int
    is_donated: bool
    sharding: str | None = None

    @property
    def num_bytes_per_chip(self) -> int:
        """Its size on one chip."""
        if (split := re.match(r"\{devices=\[([\d,]+)\]", self.sharding or "")) is None:
            return self.num_bytes
        parts = [int(size) for size in split[1].split(",")]
        # Chips along the last of these dimensions hold the same.
        return self.num_bytes // math.prod(parts[:-1] if "last_tile_dim_replicate" in self.sharding else parts)


@dataclass(frozen=True)
class Generations:
    """How often a trainer generates completions in an optimizer step, and how many at once on all chips."""

    per_step: float
    rows: int


@dataclass(frozen=True)
class TracedProgram:
    """
    A program of a run, as it is handed to the compiler: a serialized `HloModuleProto` with shardings, and its
    arguments. It does e.g. a `"micro-step"` for a batch of all chips of shape `(batch, length)`, or `(batch, new tokens)` where
    it decodes.
    """

    kind: str
    batch_shape: tuple[int, ...]
    module: bytes
    arguments: list[Argument]
    num_chips: int

    @property
    def resident(self) -> dict[str, int]:
        """Bytes of a chip that are there before it runs and stay, by role of [`RESIDENT`]. The compiler may add padding."""
        return {
            role: sum(argument.num_bytes_per_chip for argument in self.arguments if argument.role == role)
            for role in RESIDENT
        }


@dataclass(frozen=True)
class CompiledProgram:
    """
    A program of a run, as the compiler for TPU made it: as in [`TracedProgram`], and the seconds that compiling took.

    Where the compiler refuses the program, `error` is what it says, and of what is below only `arguments` of [`RESIDENT`] are
    known, as they were traced. `memory` is bytes of a chip: `argument`, `output`, `alias` (outputs that take the place of arguments), `temp` (the most that is there at
    once beside these), `generated_code`; `arguments` bytes of these on a chip, by role; `text` the optimized HLO of
    one chip. A plan knows besides what one run does on a chip, and the FLOPs of the model in one run on all chips.
    """

    kind: str
    batch_shape: tuple[int, ...]
    seconds: float
    error: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)
    text: str = ""
    cost: Cost | None = None
    model_flops: float | None = None

    @property
    def resident(self) -> dict[str, int]:
        """As [`TracedProgram.resident`]."""
        return {role: self.arguments.get(role, 0) for role in RESIDENT}

    @property
    def tokens(self) -> int:
        """Tokens of a batch of all chips, padding included."""
        rows, length, *_ = self.batch_shape
        return rows * length

    @property
    def out_of_memory(self) -> bool:
        """Whether the compiler refused it because it does not fit."""
        return self.error is not None and "RESOURCE_EXHAUSTED" in self.error

    @property
    def uncounted_bytes(self) -> int:
        """
        Bytes of its state that are not in what the compiler says of a program that it refuses: where temporaries alone are too many,
        it ends before it counts arguments, and says that they are 0B.
        """
        return sum(self.resident.values()) if self.bytes_said("arguments") == 0 else 0

    def bytes_said(self, words: str) -> int | None:
        """The size that the compiler's error has after some words."""
        match = re.search(rf"\b{words}\s+([\d.]+)([BKMGT])", self.error or "")
        return None if match is None else round(float(match[1]) * 2 ** (10 * "BKMGT".index(match[2])))

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of a chip's memory by what holds them, of this program alone, in the order of the page. Not of one that is refused."""
        of_arguments = {role: self.arguments.get(role, 0) for role in (*RESIDENT, "batch")}
        of_arguments |= {role: self.arguments[role] for role in OF_GENERATION if self.arguments.get(role)}
        return of_arguments | {
            "other arguments": self.memory["argument"] - sum(of_arguments.values()),
            "outputs": self.memory["output"] - self.memory["alias"],
            "activations and temporaries": self.memory["temp"],
            "generated code": self.memory["generated_code"],
        }


def find_state(programs: Sequence[TracedProgram | CompiledProgram]) -> dict[str, int]:
    """Bytes that a chip keeps while programs run, by role."""
    return {role: max(program.resident[role] for program in programs) for role in RESIDENT}
