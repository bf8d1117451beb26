"""What the instructions of a compiled XLA program (HLO) move to and from the chip's main memory."""

from collections.abc import Iterator

from .hlo import KERNEL, Instruction, Module, Shape


#: Instructions that move nothing, or whose traffic is counted elsewhere: in what they call, at the other end of a pair.
_FREE = set(
    "add-dependency after-all bitcast call conditional constant get-tuple-element opt-barrier parameter partition-id "
    "replica-id tuple while".split()
)
_SLICES = {"dynamic-slice", "gather", "slice"}


def memory_bytes(line: Instruction, lines: dict[str, Instruction], module: Module) -> int:
    """The traffic of an instruction that is not inside of a fusion, in bytes. Tensors that the compiler keeps on the chip are left out."""
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return 0
    if line.opcode == "custom-call" and KERNEL not in line.rest:
        # The compiler's notes to itself: allocations, views, halves of integers.
        return 0
    operands = [lines[operand] for operand in line.operands]
    if line.opcode in ("copy-start", "slice-start"):
        # Its result, its source and a flag, in the order of each.
        result = line.shapes[0 if line.opcode == "copy-start" else 1]
        return _in_memory(result) + (0 if operands[0].shapes[0].space else result.num_bytes)
    if line.opcode == "fusion":
        (callee,) = line.callees
        num_bytes = sum(
            min(_in_memory(operand.shapes[0]), _bytes_read(module, callee, index))
            for index, operand in enumerate(operands)
            if len(operand.shapes) == 1
        )
        outputs = zip(line.shapes, _bytes_written(module, callee), strict=False)
        return num_bytes + sum(min(_in_memory(shape), size) for shape, size in outputs)
    if line.opcode in _SLICES:
        result = line.shapes[0]
        return (0 if operands[0].shapes[0].space else result.num_bytes) + _in_memory(result)
    if line.opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1 if line.opcode == "dynamic-update-slice" else -1].shapes[0]
        return _in_memory(update) + (0 if line.shapes[0].space else update.num_bytes)
    inputs = [shape for operand in operands for shape in operand.shapes]
    # The result of an asynchronous start holds its operands before what it makes, and flags after that.
    is_pair = line.opcode.endswith("-start") and len(line.shapes) > len(inputs)
    results = line.shapes[len(inputs) : 2 * len(inputs)] if is_pair else line.shapes
    return sum(map(_in_memory, inputs)) + sum(map(_in_memory, results))


def _in_memory(shape: Shape) -> int:
    return 0 if shape.space else shape.num_bytes


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
        elif line.opcode == "fusion" and _is_view(module, line.callees[0], index):
            yield from _read_by_users(module, lines, line)
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
