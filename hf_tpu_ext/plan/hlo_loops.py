"""Trip counts of the loops of a compiled XLA program (HLO)."""

import operator
import re
from collections.abc import Callable
from functools import cache

from .hlo import Instruction, Module


_Integers = Callable[[int], int | None]
#: Loops of more iterations are not counted.
MAX_TRIPS = 10_000
_OPERATIONS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("bitcast", "bitcast-convert", "convert", "copy", "reshape"), operator.pos),
    "not": operator.invert,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "maximum": max,
    "minimum": min,
}
_DIRECTIONS = {name: vars(operator)[name.lower()] for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}


def count_trips(module: Module, computation: str, loop: Instruction) -> int | None:
    """
    Count how often the body of a loop in a computation runs; `None` if it depends on data, or is above [`MAX_TRIPS`]. Of a loop
    that data may end early, it is the most.

    Compilers say it in the loop's `known_trip_count`, or not at all. Then the numbers that the loop's condition
    depends on are followed, iteration by iteration, from what the loop starts with.
    """
    if trip_count := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest):
        return int(trip_count[1])
    condition, body = loop.attribute("condition").strip("%"), loop.attribute("body").strip("%")
    element = _elements(module, computation, loop.operands[0], lambda index: None)
    for trips in range(MAX_TRIPS):
        goes_on = _evaluator(module, condition, element, may_go_on=True)(module.root(condition).name)
        if not goes_on:
            return None if goes_on is None else trips
        element = _elements(module, body, module.root(body).name, element)
    return None


def _elements(module: Module, computation: str, name: str, argument: _Integers) -> _Integers:
    """A function that works out an integer in a tuple of a computation, by its place in it."""
    line = module.computations[computation][name]
    value = _evaluator(module, computation, argument)
    return lambda index: value(line.operands[index]) if line.opcode == "tuple" else None


def _evaluator(
    module: Module, computation: str, argument: _Integers, may_go_on: bool = False
) -> Callable[[str], int | None]:
    """
    A function that works out an integer of a computation, by the name of its instruction: `None` if it depends on
    data. `argument` gives the computation's arguments, or the elements of its only argument if that is a tuple. With
    `may_go_on`, one of two conditions is taken as met if it depends on data.
    """
    lines = module.computations[computation]

    @cache
    def value(name: str) -> int | None:
        line = lines[name]
        dtype, operands = line.type_text.partition("[")[0], line.operands
        # A single integer.
        if not re.fullmatch(r"pred|[su]\d+", dtype) or line.shapes[0].size != 1:
            return None
        if line.opcode == "constant":
            text = line.rest.partition(")")[0].strip("{} ")
            return text == "true" if dtype == "pred" else _wrap(int(text), dtype)
        if line.opcode == "parameter":
            return argument(int(line.rest.partition(")")[0]))
        if line.opcode == "get-tuple-element":
            return argument(int(line.attribute("index"))) if lines[operands[0]].opcode == "parameter" else None
        if line.opcode in ("fusion", "call"):
            (callee,) = line.callees
            inner = _evaluator(module, callee, lambda index: value(operands[index]), may_go_on)
            return inner(module.root(callee).name)
        if line.opcode == "select":
            # The other operand may depend on data. It is evaluated all the same, so that a late iteration needs no deep recursion.
            predicate, yes, no = map(value, operands)
            return None if predicate is None else yes if predicate else no
        is_comparison = line.opcode == "compare"
        compute = _DIRECTIONS[line.attribute("direction")] if is_comparison else _OPERATIONS.get(line.opcode)
        numbers = [] if compute is None else [value(operand) for operand in operands]
        if may_go_on and line.opcode == "and" and dtype == "pred":
            known_numbers = [number for number in numbers if number is not None]
            numbers = numbers if len(known_numbers) != 1 else known_numbers * 2
        return None if compute is None or None in numbers else _wrap(compute(*numbers), dtype)

    return value


def _wrap(value: int, dtype: str) -> int:
    if dtype == "pred":
        return value & 1
    bits = int(dtype[1:])
    value %= 1 << bits
    return value - (1 << bits) if dtype[0] == "s" and value >> (bits - 1) else value
