"""Reads the text of compiled XLA programs (HLO): their instructions, the arguments of each device, and what crosses between
devices."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


#: What marks the instructions that run kernels.
KERNEL = 'custom_call_target="tpu_custom_call"'
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# The layout says which memory a tensor is in: `{1,0:T(8,128)S(1)}`.
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\](?:\{[^}]*?S\((\d+)\)[^}]*\})?")
_INSTRUCTION = re.compile(r"^ *(ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*?^}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%([\w.-]+)|\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Shape:
    """
    Shape of a tensor on one device, with XLA's name of its type, e.g. `"f32"`, `"bf16"`, `"pred"`, and the number of
    the memory that holds it: `0` is the main one, of a TPU its HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        bits = 8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype)[0])
        return self.size * bits // 8

    @property
    def bytes_in_memory(self) -> int:
        """What of it is in the main memory: nothing, where the compiler keeps it on the chip."""
        return 0 if self.space else self.num_bytes


@dataclass(frozen=True)
class Instruction:
    """
    A line of a program: the name and type of its result, what it does, its operands and attributes, and whether its
    result is that of its computation.
    """

    name: str
    type_text: str
    opcode: str
    rest: str
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Its result: one shape, or those of a tuple's elements."""
        return parse_shapes(self.type_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of what it takes."""
        return tuple(re.findall(r"%([\w.-]+)", self.rest.partition(")")[0]))

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it refers to."""
        return tuple(
            name.strip(" %") for groups in _CALLED.findall(self.rest) for name in (groups[0] or groups[1]).split(",")
        )

    @property
    def op_name(self) -> str:
        """What whoever wrote the program has named it, in its metadata; empty where it has no name."""
        match = re.search(r'metadata=\{[^}]*?op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, e.g. of `"dim_labels"`, without braces."""
        match = re.search(rf"[, ]{name}=(?:\{{([^}}]*)\}}|([^, ]+))", self.rest)
        return match and (match[2] if match[1] is None else match[1])


@dataclass(frozen=True)
class Module:
    """
    A program: the instructions of each computation, by name and in order, and the name of the one that it enters.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def root(self, computation: str) -> Instruction:
        """The instruction that makes the result of a computation."""
        return next(line for line in self.computations[computation].values() if line.is_root)


@dataclass(frozen=True)
class Collective:
    """
    An operation in which devices exchange data, one of [`KINDS`], in a computation.

    Its tensors are as one device has them whole: what an all-gather makes, what the others take; compilers combine
    several into one operation. The group size is the number of devices that exchange with each other; `None` where that is
    not known, or they pass on what they have.
    """

    kind: str
    tensors: tuple[Shape, ...]
    group_size: int | None = field(default=None, compare=False)
    computation: str = field(default="", compare=False)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """
    Read the type of an instruction, e.g. `"f32[2,3]{1,0}"` or `"(bf16[8]{0}, pred[])"`: its shape, or those of a
    tuple's elements.
    """
    return tuple(
        Shape(dtype, tuple(int(size) for size in dims.split(",") if size), int(space or 0))
        for dtype, dims, space in _SHAPE.findall(text)
    )


def parse_module(text: str) -> Module:
    """Read a program from an optimized HLO module."""
    computations, entry = {}, ""
    for computation in _COMPUTATION.finditer(text):
        computations[computation[2]] = {
            name: Instruction(name, result, opcode, rest, bool(root))
            for root, name, result, opcode, rest in _INSTRUCTION.findall(computation[0])
        }
        if computation[1]:
            entry = computation[2]
    return Module(computations, entry)


def find_collectives(module: Module) -> Iterator[Collective]:
    """
    Find the collectives of a program, in the order of its text. Each is listed once, also inside of a loop; of an
    asynchronous pair only the start is, and of operations that are parts of one exchange the first.
    """
    channels = set()
    for computation, lines in module.computations.items():
        # Compilers for TPU have no instruction for a reduce-scatter: they fuse an all-reduce with the slicing of its result.
        # The channel of such an all-reduce says nothing.
        is_fused = computation.startswith("all-reduce-scatter")
        for line in lines.values():
            kind = line.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            channel = line.attribute("channel_id")
            if not is_fused and channel in channels:
                continue
            if not is_fused and channel is not None:
                channels.add(channel)
            operands = tuple(shape for operand in line.operands for shape in lines[operand].shapes)
            # The result of an asynchronous start holds its operands as well, before what it makes.
            tensors = line.shapes[-len(operands) :] if kind == "all-gather" else operands
            # Written out, {{0,1},{2,3}}, or as a grid of devices, [2,2]<=[4].
            groups = re.search(r"\breplica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", line.rest)
            group_size = groups and (groups[1].count(",") + 1 if groups[1] else int(groups[2]))
            yield Collective("reduce-scatter" if is_fused else kind, tensors, group_size, computation)


def argument_shapes(text: str) -> list[Shape]:
    """The parameters of a program, in their order, as each device holds them when it starts."""
    module = parse_module(text)
    parameters = [line for line in module.computations[module.entry].values() if line.opcode == "parameter"]
    return [
        shape
        for line in sorted(parameters, key=lambda line: int(line.rest.partition(")")[0]))
        for shape in line.shapes
    ]
