"""What a compiled XLA program (HLO) does each time that it runs: its arithmetic, its memory traffic, its collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from .hlo import KERNEL, PRODUCTS, Collective, Instruction, Module, Shape, find_collectives, parse_module
from .hlo_loops import count_turns
from .hlo_parts import LAYER, part_of


#: Instructions that move nothing, or whose traffic is counted elsewhere: in what they call, at the other end of a pair.
_FREE = set(
    "add-dependency after-all bitcast call conditional constant get-tuple-element opt-barrier parameter partition-id "
    "replica-id tuple while".split()
)
_SLICES = {"dynamic-slice", "gather", "slice"}
_MOVES = _SLICES | set("broadcast concatenate copy dynamic-update-slice pad reshape reverse scatter transpose".split())
_LAYOUT, _BROADCASTS = "copies and layout", "broadcasts"
# Kernels are programs of their own: what they do is not in the text, but for the arithmetic that they are named with.
_KERNEL_FLOPS = re.compile(r"\battention_kernel\[flops=(\d+)\]")


@dataclass(frozen=True)
class Exchange:
    """
    All collectives of a kind in one run of a program: how many, the bytes of their tensors as
    [`Collective`](hlo.Collective) has them, and what a chip must send at least, with the best of algorithms; and the chips of
    a host together to other hosts. Of the collectives and their bytes, those that go on while the chip computes.
    """

    kind: str
    count: int
    num_bytes: int
    link_bytes: int
    host_bytes: int = 0
    overlapped: int = 0
    overlapped_bytes: int = 0


@dataclass(frozen=True)
class Cost:
    """
    What one chip does in one run of a program, and what could not be counted, in words. Bodies of loops count for each
    turn.

    FLOPs are those of matrix products. Memory traffic is that of the chip's main memory: tensors that the compiler
    keeps on the chip are left out, and of a tensor of which a part is taken, the rest. Cycles are the compiler's own
    estimate of what each instruction takes, by part of the model, or kind of instruction: it knows vector work and layouts,
    but has none for collectives and kernels. Of kernels there are the FLOPs that they are named with.
    """

    matrix_flops: int
    memory_bytes: int
    exchanges: list[Exchange]
    unknown: list[str]
    cycles: dict[str, int] = field(default_factory=dict)
    kernel_flops: int = 0

    @property
    def link_bytes(self) -> int:
        """Bytes that a chip must send to others."""
        return sum(exchange.link_bytes for exchange in self.exchanges)

    @property
    def host_bytes(self) -> int:
        """Bytes that the chips of a host must send to other hosts."""
        return sum(exchange.host_bytes for exchange in self.exchanges)


def measure_cost(text: str, hosts: Sequence[Sequence[int]] = ()) -> Cost:
    """
    Count what a program, an optimized HLO module, does on the chips of some hosts, by default of one. Loops whose number of turns is not in the program count once,
    kernels that are not named with their FLOPs (`attention_kernel[flops=N]`) not at all; `unknown` names them.
    """
    module = parse_module(text)
    runs, unknown = count_runs(module)
    matrix_flops = memory_bytes = kernel_flops = 0
    cycles: Counter[str] = Counter()
    for (computation, fused), times in runs.items():
        lines = module.computations[computation]
        for line in lines.values():
            matrix_flops += times * _matrix_flops(line, lines)
            if not fused:
                memory_bytes += times * _memory_bytes(line, lines, module)
                if estimated := re.search(r'"estimated_cycles":"(\d+)"', line.rest):
                    cycles[_class(line, module)] += times * int(estimated[1])
            if KERNEL in line.rest:
                if named := _KERNEL_FLOPS.search(line.op_name):
                    kernel_flops += times * int(named[1])
                else:
                    unknown[f"what the kernel {line.name} does"] += 1
    exchanges, cycles = _exchanges(module, runs, hosts), dict(cycles.most_common())
    return Cost(matrix_flops, memory_bytes, exchanges, list(unknown), cycles, kernel_flops)


def count_runs(module: Module) -> tuple[Counter[tuple[str, bool]], Counter[str]]:
    """How often each computation runs, apart from those inside of fusions; and what is not known of that."""
    runs: Counter[tuple[str, bool]] = Counter()
    unknown: Counter[str] = Counter()

    def run(computation: str, times: int, fused: bool) -> None:
        runs[computation, fused] += times
        for line in module.computations[computation].values():
            if line.opcode == "while":
                turns = count_turns(module, computation, line)
                if turns is None:
                    unknown[f"the number of turns of the loop {line.name}"] += 1
                    turns = 1
                for called in line.called:
                    run(called, times * turns, fused)
            elif "to_apply=" not in line.rest or line.opcode == "call":
                # What a reduction applies to each pair of elements counts with the reduction.
                for called in line.called:
                    run(called, times, fused or line.opcode == "fusion")

    run(module.entry, 1, False)
    return runs, unknown


def _class(line: Instruction, module: Module) -> str:
    """What cycles of an instruction are counted as: layout and broadcasts by themselves, the rest by part where it is known."""
    fused = list(_fused(line, module))
    kind = _kind({line.opcode, *(inner.opcode for inner, _ in fused)})
    if kind in (_LAYOUT, _BROADCASTS):
        return kind
    # Of what is fused, the largest product says it, or else the whole, or most of it.
    products = [item for item in fused if item[0].opcode in PRODUCTS]
    parts = [part_of(inner) for inner, _ in sorted(products, key=lambda item: _matrix_flops(*item))[-1:]]
    parts.append(part_of(line))
    parts += [part for part, _ in Counter(part_of(inner) for inner, _ in fused).most_common()]
    part = next((part for part in parts if part is not None), LAYER)
    return kind if part == LAYER else part


def _fused(line: Instruction, module: Module) -> Iterator[tuple[Instruction, dict[str, Instruction]]]:
    """What an instruction fuses, each with the instructions around it."""
    computations = list(line.called) if line.opcode == "fusion" else []
    for computation in computations:
        lines = module.computations[computation]
        for inner in lines.values():
            yield inner, lines
            computations += inner.called if inner.opcode == "fusion" else []


def _kind(opcodes: set[str]) -> str:
    """What an instruction is mostly about, by what it does and fuses."""
    if opcodes & PRODUCTS:
        return "matrix products"
    opcodes -= _FREE | {"fusion", "convert", "iota"}
    if opcodes <= {"broadcast"}:
        return _BROADCASTS
    if opcodes <= _MOVES:
        return _LAYOUT
    return "reductions" if "reduce" in opcodes else "elementwise"


def _exchanges(module: Module, runs: Counter[tuple[str, bool]], hosts: Sequence[Sequence[int]] = ()) -> list[Exchange]:
    host_of = {chip: host for host, chips in enumerate(hosts) for chip in chips}
    totals: dict[str, list[int]] = {}
    for item in find_collectives(module):
        times = runs[item.computation, False] + runs[item.computation, True]
        # Without a group: a permutation, which sends all of it.
        others = 1.0 if item.group_size is None else 1 - 1 / item.group_size
        passes = 2 if item.kind == "all-reduce" else 1
        total = totals.setdefault(item.kind, [0, 0, 0, 0, 0, 0])
        total[0] += times
        total[1] += times * item.num_bytes
        total[2] += times * round(passes * others * item.num_bytes)
        total[3] += times * round(passes * _sent_by_host(item, host_of) * item.num_bytes)
        total[4] += times * item.is_overlapped
        total[5] += times * item.is_overlapped * item.num_bytes
    return [Exchange(kind, *total) for kind, total in totals.items()]


def _sent_by_host(item: Collective, host_of: dict[int, int]) -> float:
    """How many times the bytes of a collective the chips of the host that sends most send to others, at least."""
    if len(set(host_of.values())) < 2:
        return 0.0
    sent: Counter[int] = Counter()
    # Where the program does not say, all chips exchange with each other.
    for group in item.groups or (tuple(host_of),):
        chips = Counter(host_of[chip] for chip in group)
        for host, own in chips.items():
            if item.kind == "collective-permute":
                sent[host] += len(chips) > 1 and host == host_of[group[0]]
            else:
                # What its own chips have in common goes once; of an all-to-all, each has its own.
                sent[host] += (own if item.kind == "all-to-all" else 1) * (1 - own / len(group))
    return max(sent.values(), default=0.0)


def _matrix_flops(line: Instruction, lines: dict[str, Instruction]) -> int:
    if line.opcode == "dot":
        left = lines[line.operands[0]].shapes[0]
        contracted = [left.dims[int(dim)] for dim in line.attribute("lhs_contracting_dims").split(",") if dim]
        return 2 * line.shapes[0].size * math.prod(contracted)
    if line.opcode != "convolution":
        return 0
    left, right = (lines[operand].shapes[0] for operand in line.operands[:2])
    labels = re.split(r"_|->", line.attribute("dim_labels"))
    sizes = [
        dict(zip(label, dims, strict=True))
        for label, dims in zip(labels, (left.dims, right.dims, line.shapes[0].dims), strict=True)
    ]
    inputs, kernel, outputs = sizes
    window = _parse_window(line.attribute("window") or "")
    # Compilers for TPU make batch dimensions of a product into dimensions of the window, padded and dilated such that most of
    # its positions meet nothing.
    positions = math.prod(
        _count_positions(inputs[str(dim)], kernel[str(dim)], outputs[str(dim)], *(values[dim] for values in window))
        for dim in range(len(left.dims) - 2)
    )
    groups = int(line.attribute("batch_group_count") or 1)
    return 2 * positions * kernel["i"] * kernel["o"] * inputs["b"] // groups


def _parse_window(text: str) -> tuple[list[int], ...]:
    """Strides, paddings below, dilations of the input and of the window, for each dimension."""
    given = dict(part.split("=") for part in text.split())
    count = len(given.get("size", "").split("x")) if given else 0
    strides, left, right = (
        [int(value) for value in given[name].split("x")] if name in given else [1] * count
        for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    paddings = [int(value.split("_")[0]) for value in given["pad"].split("x")] if "pad" in given else [0] * count
    return strides, paddings, left, right


@cache
def _count_positions(
    size: int, window: int, outputs: int, stride: int, padding: int, dilation: int, window_dilation: int
) -> int:
    """In how many places along a dimension, of all outputs, the window meets an element of the input."""
    last = (size - 1) * dilation
    places = (
        output * stride + offset * window_dilation - padding for output in range(outputs) for offset in range(window)
    )
    return sum(0 <= place <= last and place % dilation == 0 for place in places)


def _in_memory(shape: Shape) -> int:
    return 0 if shape.space else shape.num_bytes


def _memory_bytes(line: Instruction, lines: dict[str, Instruction], module: Module) -> int:
    """Traffic of an instruction that is not inside of a fusion."""
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return 0
    if line.opcode == "custom-call" and KERNEL not in line.rest:
        # The compiler's notes to itself: allocations, views, halves of integers.
        return 0
    taken = [lines[operand] for operand in line.operands]
    if line.opcode in ("copy-start", "slice-start"):
        # Its result, its source and a flag, in the order of each.
        made = line.shapes[0 if line.opcode == "copy-start" else 1]
        return _in_memory(made) + (0 if taken[0].shapes[0].space else made.num_bytes)
    if line.opcode == "fusion":
        (called,) = line.called
        read = sum(
            min(_in_memory(operand.shapes[0]), _bytes_read(module, called, index))
            for index, operand in enumerate(taken)
            if len(operand.shapes) == 1
        )
        written = zip(line.shapes, _bytes_written(module, called), strict=False)
        return read + sum(min(_in_memory(shape), size) for shape, size in written)
    if line.opcode in _SLICES:
        made = line.shapes[0].num_bytes
        return (0 if taken[0].shapes[0].space else made) + _in_memory(line.shapes[0])
    if line.opcode in ("dynamic-update-slice", "scatter"):
        update = taken[1 if line.opcode == "dynamic-update-slice" else -1].shapes[0]
        return _in_memory(update) + (0 if line.shapes[0].space else update.num_bytes)
    given = [shape for operand in taken for shape in operand.shapes]
    # The result of an asynchronous start holds its operands before what it makes, and flags after that.
    is_pair = line.opcode.endswith("-start") and len(line.shapes) > len(given)
    made = line.shapes[len(given) : 2 * len(given)] if is_pair else line.shapes
    return sum(map(_in_memory, given)) + sum(map(_in_memory, made))


def _bytes_read(module: Module, computation: str, argument: int) -> int:
    """What a fusion reads of an argument."""
    lines = module.computations[computation]
    return sum(_read_by_users(module, lines, _parameter(lines, argument)))


def _parameter(lines: dict[str, Instruction], argument: int) -> Instruction:
    return next(line for line in lines.values() if line.opcode == "parameter" and line.rest.startswith(f"{argument})"))


def _read_by_users(module: Module, lines: dict[str, Instruction], source: Instruction) -> Iterator[int]:
    for line in lines.values():
        if line.opcode == "parameter" or source.name not in line.operands:
            continue
        index = line.operands.index(source.name)
        if line.opcode in _SLICES and index == 0:
            yield line.shapes[0].num_bytes
        elif line.opcode == "dynamic-update-slice" and index == 0:
            # Written to in place.
            continue
        elif line.opcode == "bitcast":
            yield from _read_by_users(module, lines, line)
        elif line.opcode == "fusion" and _is_view(module, line.called[0], index):
            yield from _read_by_users(module, lines, line)
        elif line.opcode == "fusion":
            yield _bytes_read(module, line.called[0], index)
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

    def written(line: Instruction) -> list[int]:
        if line.opcode == "tuple":
            return [size for operand in line.operands for size in written(lines[operand])]
        if line.opcode == "bitcast":
            return written(lines[line.operands[0]])
        if line.opcode == "fusion":
            return _bytes_written(module, line.called[0])
        if line.opcode == "dynamic-update-slice":
            return [lines[line.operands[1]].shapes[0].num_bytes]
        return [shape.num_bytes for shape in line.shapes]

    return written(module.root(computation))
