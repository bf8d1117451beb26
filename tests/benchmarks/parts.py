"""Cycles of a compiled step by part of the model, which the metadata of its instructions names (see `trace_parts.py`)."""

import re
from collections import Counter
from collections.abc import Iterator

from hf_tpu_ext.plan.hlo import Instruction, Module, parse_module
from hf_tpu_ext.plan.hlo_cost import count_runs, estimated_cycles


ATTENTION, ROPE_AND_NORMS, ADAPTERS = "attention", "rope and norms", "adapters"
HEAD, OPTIMIZER = "head", "optimizer"
#: All that computes the features of images.
VISION = "vision tower"
#: The rest of a layer: its matrix products, and what is between them.
LAYER = "layer"
_SCOPE = re.compile(rf"\[({'|'.join((ATTENTION, ROPE_AND_NORMS, ADAPTERS, HEAD, OPTIMIZER, VISION, LAYER))})\]")
_PRODUCTS = {"convolution", "dot"}
_LAYOUT, _BROADCASTS = "copies and layout", "broadcasts"
_MOVES = set(
    "broadcast concatenate copy dynamic-slice dynamic-update-slice gather pad reshape reverse scatter slice transpose".split()
)
# What does nothing by itself.
_FREE = set(
    "add-dependency after-all bitcast call conditional constant convert fusion get-tuple-element iota opt-barrier parameter "
    "partition-id replica-id tuple while".split()
)


def scope_of(part: str) -> str:
    """The name of the operations of a part, which compilers keep as the metadata of instructions."""
    return f"[{part}]"


def cycles_by_part(text: str) -> dict[str, int]:
    """
    The cycles that the compiler estimates for a program, largest first: by part of the model where its instructions are named,
    but, outside a vision tower, copies and broadcasts by themselves, and of layers by kind of instruction.
    """
    module = parse_module(text)
    cycles: Counter[str] = Counter()
    for (computation, fused), times in count_runs(module)[0].items():
        for line in () if fused else module.computations[computation].values():
            if estimated := estimated_cycles(line):
                cycles[_class(line, module)] += times * estimated
    return dict(cycles.most_common())


def _class(line: Instruction, module: Module) -> str:
    fused = list(_fused(line, module))
    kind = _kind({line.opcode, *(inner.opcode for inner, _ in fused)})
    # Of what is fused, the product with the largest factors says it, or else the whole, or most of it.
    products = [(size, inner) for inner, size in fused if inner.opcode in _PRODUCTS]
    parts = [_part_of(inner) for _, inner in sorted(products, key=lambda item: item[0])[-1:]]
    parts.append(_part_of(line))
    parts += [part for part, _ in Counter(_part_of(inner) for inner, _ in fused).most_common()]
    part = next((part for part in parts if part is not None), LAYER)
    return kind if part == LAYER or (kind in (_LAYOUT, _BROADCASTS) and part != VISION) else part


def _fused(line: Instruction, module: Module) -> Iterator[tuple[Instruction, int]]:
    """What an instruction fuses, each with the number of elements that it takes and makes."""
    computations = list(line.callees) if line.opcode == "fusion" else []
    for computation in computations:
        lines = module.computations[computation]
        for inner in lines.values():
            taken = (lines[name] for name in inner.operands) if inner.opcode in _PRODUCTS else ()
            yield inner, sum(shape.size for each in (inner, *taken) for shape in each.shapes)
            computations += inner.callees if inner.opcode == "fusion" else []


def _part_of(line: Instruction) -> str | None:
    """The part that the metadata of an instruction names, the innermost if it names several; `None` if it names none."""
    found = _SCOPE.findall(line.op_name)
    return found[-1] if found else None


def _kind(opcodes: set[str]) -> str:
    """What an instruction is mostly about, by what it does and fuses."""
    if opcodes & _PRODUCTS:
        return "matrix products"
    opcodes -= _FREE
    if opcodes <= {"broadcast"}:
        return _BROADCASTS
    if opcodes <= _MOVES:
        return _LAYOUT
    return "reductions" if "reduce" in opcodes else "elementwise"
