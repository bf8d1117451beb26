"""What a plan passes from hand to hand: programs as they were traced, and as they were compiled."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Argument:
    """
    An argument of a traced program: what it is for (weights, optimizer state, gradients, batch, other), its whole size,
    whether a result takes its place, and how it is split over the chips, as HLO writes it, where the module does not
    say.
    """

    role: str
    num_bytes: int
    donated: bool
    sharding: str | None = None


@dataclass(frozen=True)
class TracedProgram:
    """
    A program of a run, as it is handed to the compiler: a serialized `HloModuleProto` with shardings, and its
    arguments. It does e.g. a `"micro-step"` for a batch of all chips of shape `(batch, length)`.
    """

    kind: str
    batch_shape: tuple[int, ...]
    module: bytes
    arguments: list[Argument]
    num_chips: int


@dataclass(frozen=True)
class CompiledProgram:
    """
    A program of a run, as the compiler for TPU made it: as in [`TracedProgram`], and the seconds that compiling took,
    with the processor time of all cores.

    Where the compiler refuses the program, `error` is what it says, and nothing below is known. `memory` is bytes of a
    chip: `argument`, `output`, `alias` (outputs that take the place of arguments), `temp` (the most that is there at
    once beside these), `generated_code`; `arguments` bytes of these on a chip, by role; `text` the optimized HLO of
    one chip.
    """

    kind: str
    batch_shape: tuple[int, ...]
    seconds: float
    error: str | None = None
    memory: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float | None = None
    text: str = ""
