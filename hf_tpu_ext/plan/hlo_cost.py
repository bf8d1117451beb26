"""What a compiled XLA program (HLO) does each time that it runs: its cycles, its memory traffic, its collectives."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .hlo import KERNEL, KINDS, Instruction, Module, find_collectives, parse_module
from .hlo_loops import count_trips


# Kernels are programs of their own: what they do is not in the text, but for the arithmetic that they are named with.
_KERNEL_FLOPS = re.compile(r"\battention_kernel\[flops=(\d+)\]")
# Instructions that move nothing, or whose traffic is counted elsewhere: in what they call, at the other end of a pair.
_FREE = set(
    "add-dependency after-all bitcast call conditional constant get-tuple-element opt-barrier parameter partition-id "
    "replica-id tuple while".split()
)
_SLICES = {"dynamic-slice", "gather", "slice"}
# A collective goes on beside several products, in fusions of this name, which hand its tensors on. It counts where it begins.
_BESIDE_PRODUCT = "async_collective_fusion"


@dataclass(frozen=True)
class Exchange:
    """
    All collectives of a kind in one run of a program: how many, the bytes of their tensors as
    [`Collective`](hlo.Collective) has them, and what a chip must send at least, with the best of algorithms.
    """

    kind: str
    count: int
    num_bytes: int
    link_bytes: int


@dataclass(frozen=True)
class Cost:
    """
    What one chip does in one run of a program, and what could not be counted, in words. Bodies of loops count for each
    turn.

    Cycles are the compiler's own estimate of what each instruction takes: it knows vector work and layouts, but has none for
    collectives and kernels. Memory traffic is that of the chip's main memory: tensors that the compiler keeps on the chip are
    left out, and of a tensor of which a part is taken, the rest. Of kernels there are the FLOPs that they are named with.
    """

    cycles: int
    memory_bytes: int
    exchanges: list[Exchange]
    unknown: list[str]
    kernel_flops: int = 0

    @property
    def link_bytes(self) -> int:
        """Bytes that a chip must send to others."""
        return sum(exchange.link_bytes for exchange in self.exchanges)


def measure_cost(text: str) -> Cost:
    """
    Count what a program, an optimized HLO module, does. Loops whose number of turns is not in the program count once, kernels
    that are not named with their FLOPs (`attention_kernel[flops=N]`) not at all; `unknown` names them.
    """
    module = parse_module(text)
    runs, unknown = count_runs(module)
    cycles = traffic = kernel_flops = 0
    for (computation, is_fused), times in runs.items():
        lines = module.computations[computation]
        for line in lines.values():
            if not is_fused:
                cycles += times * estimated_cycles(line)
                traffic += times * memory_bytes(line, lines, module)
            if KERNEL in line.rest:
                if match := _KERNEL_FLOPS.search(line.op_name):
                    kernel_flops += times * int(match[1])
                else:
                    unknown[f"what the kernel {line.name} does"] += 1
    return Cost(cycles, traffic, _exchanges(module, runs), list(unknown), kernel_flops)


def estimated_cycles(line: Instruction) -> int:
    """What the compiler estimates for an instruction that is not inside of a fusion; 0 where it says nothing."""
    match = re.search(r'"estimated_cycles":"(\d+)"', line.rest)
    return 0 if match is None else int(match[1])


def count_runs(module: Module) -> tuple[Counter[tuple[str, bool]], Counter[str]]:
    """How often each computation runs, without those inside of fusions; and what is not known of that."""
    runs: Counter[tuple[str, bool]] = Counter()
    unknown: Counter[str] = Counter()

    def run(computation: str, times: int, is_fused: bool) -> None:
        runs[computation, is_fused] += times
        for line in module.computations[computation].values():
            if line.opcode == "while":
                trips = count_trips(module, computation, line)
                if trips is None:
                    unknown[f"the trip count of the loop {line.name}"] += 1
                    trips = 1
                for callee in line.callees:
                    run(callee, times * trips, is_fused)
            elif "to_apply=" not in line.rest or line.opcode == "call":
                # What a reduction applies to each pair of elements counts with the reduction.
                for callee in line.callees:
                    run(callee, times, is_fused or line.opcode == "fusion")

    run(module.entry, 1, False)
    return runs, unknown


def _exchanges(module: Module, runs: Counter[tuple[str, bool]]) -> list[Exchange]:
    totals: dict[str, list[int]] = {}
    for item in find_collectives(module):
        times = runs[item.computation, False] + runs[item.computation, True]
        # A permutation has no group, and sends all of it.
        others = 1.0 if item.group_size is None else 1 - 1 / item.group_size
        passes = 2 if item.kind == "all-reduce" else 1
        total = totals.setdefault(item.kind, [0, 0, 0])
        total[0] += times
        total[1] += times * item.num_bytes
        total[2] += times * round(passes * others * item.num_bytes)
    return [Exchange(kind, *total) for kind, total in totals.items()]


# ---- Memory traffic ----


def memory_bytes(line: Instruction, lines: dict[str, Instruction], module: Module) -> int:
    """The traffic of an instruction that is not inside of a fusion, in bytes. Tensors that the compiler keeps on the chip are left out."""
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return 0
    if line.opcode == "custom-call" and KERNEL not in line.rest:
        # The compiler's notes to itself: allocations, views, halves of integers.
        return 0
    operands = [lines[operand] for operand in line.operands]
    if line.opcode in ("copy-start", "slice-start"):
        # Both have a result, a source and a flag, a copy in this order, a slice with the source first.
        result = line.shapes[0 if line.opcode == "copy-start" else 1]
        return result.bytes_in_memory + (0 if operands[0].shapes[0].space else result.num_bytes)
    if line.opcode == "fusion":
        (callee,) = line.callees
        num_bytes = sum(
            min(operand.shapes[0].bytes_in_memory, _bytes_read(module, callee, index))
            for index, operand in enumerate(operands)
            if len(operand.shapes) == 1
        )
        outputs = zip(line.shapes, _bytes_written(module, callee), strict=False)
        return num_bytes + sum(min(shape.bytes_in_memory, size) for shape, size in outputs)
    if line.opcode in _SLICES:
        result = line.shapes[0]
        return (0 if operands[0].shapes[0].space else result.num_bytes) + result.bytes_in_memory
    if line.opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if line.opcode == "dynamic-update-slice" else -1].shapes[0]
        return update.bytes_in_memory + (0 if line.shapes[0].space else update.num_bytes)
    inputs = [shape for operand in operands for shape in operand.shapes]
    # The result of an asynchronous start holds its operands before what it makes, and flags after that.
    is_pair = line.opcode.endswith("-start") and len(line.shapes) > len(inputs)
    results = line.shapes[len(inputs) : 2 * len(inputs)] if is_pair else line.shapes
    return sum(shape.bytes_in_memory for shape in (*inputs, *results))


def _bytes_read(module: Module, computation: str, argument: int) -> int:
    """What a fusion reads of an argument."""
    return sum(_read_by_users(module, computation, _parameter(module.computations[computation], argument)))


def _parameter(lines: dict[str, Instruction], argument: int) -> Instruction:
    return next(line for line in lines.values() if line.opcode == "parameter" and line.rest.startswith(f"{argument})"))


def _read_by_users(module: Module, computation: str, source: Instruction) -> Iterator[int]:
    for line in module.computations[computation].values():
        if line.opcode == "parameter" or source.name not in line.operands:
            continue
        index = line.operands.index(source.name)
        if line.opcode in (*KINDS, "tuple") and computation.startswith(_BESIDE_PRODUCT):
            continue
        elif line.opcode in _SLICES and index == 0:
            yield line.shapes[0].num_bytes
        elif line.opcode == "dynamic-update-slice" and index == 0:
            # Written to in place.
            continue
        elif line.opcode == "bitcast":
            yield from _read_by_users(module, computation, line)
        elif line.opcode == "fusion" and _is_view(module, line.callees[0], index):
            yield from _read_by_users(module, computation, line)
        elif line.opcode == "fusion":
            yield _bytes_read(module, line.callees[0], index)
        else:
            yield source.shapes[0].num_bytes


def _is_view(module: Module, computation: str, argument: int) -> bool:
    """Whether the result of a fusion is an argument, in another shape at most."""
    lines, line = module.computations[computation], module.root(computation)
    while line.opcode == "bitcast":
        line = lines[line.operands[0]]
    return line is _parameter(lines, argument)


def _bytes_written(module: Module, computation: str) -> list[int]:
    """What a fusion writes of each of its results."""
    lines = module.computations[computation]

    def sizes_of(line: Instruction) -> list[int]:
        if line.opcode in (*KINDS, "parameter") and computation.startswith(_BESIDE_PRODUCT):
            return [0] * len(line.shapes)
        if line.opcode == "tuple":
            return [size for operand in line.operands for size in sizes_of(lines[operand])]
        if line.opcode == "bitcast":
            return sizes_of(lines[line.operands[0]])
        if line.opcode == "fusion":
            return _bytes_written(module, line.callees[0])
        if line.opcode == "dynamic-update-slice":
            return [lines[line.operands[1]].shapes[0].num_bytes]
        return [shape.num_bytes for shape in line.shapes]

    return sizes_of(module.root(computation))
