"""Trip counts of the loops of a compiled XLA program (HLO)."""

import re

from .hlo import Instruction, Module


def count_trips(module: Module, computation: str, loop: Instruction) -> int | None:
    """
    Count how often the body of a loop in a computation runs; `None` where that is not known. Of a loop that data may end early, it is
    the most.

    Compilers say it in the loop's `known_trip_count`, or not at all. Then it is read from the form that the loops of this package and
    of JAX have: a counter that starts at a constant, is compared with a constant (`LT`), and is added a constant to.
    """
    if trip_count := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest):
        return int(trip_count[1])
    condition, body = loop.attribute("condition").strip("%"), loop.attribute("body").strip("%")
    in_condition, test = module.computations[condition], module.root(condition)
    if test.opcode == "and":
        # The other one, `not(done)`, is data.
        test = in_condition[test.operands[0]]
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter, end = (in_condition[operand] for operand in test.operands)
    if counter.opcode != "get-tuple-element":
        return None
    index = int(counter.attribute("index"))
    start = _element(module, computation, loop.operands[0], index)
    following = _element(module, body, module.root(body).name, index)
    if start is None or following is None or following.opcode != "add":
        return None
    before, step = (module.computations[body][operand] for operand in following.operands)
    if before.opcode != "get-tuple-element" or int(before.attribute("index")) != index:
        return None
    numbers = [_constant(line) for line in (start, end, step)]
    if None in numbers or numbers[2] < 1:
        return None
    return len(range(*numbers))


def _element(module: Module, computation: str, name: str, index: int) -> Instruction | None:
    """What an element of a tuple is a copy of; `None` where the tuple is not put together in the computation."""
    lines = module.computations[computation]
    if lines[name].opcode != "tuple":
        return None
    line = lines[lines[name].operands[index]]
    while line.opcode == "copy":
        line = lines[line.operands[0]]
    return line


def _constant(line: Instruction) -> int | None:
    """The value of a single integer that the program has; `None` for all else."""
    is_integer = line.opcode == "constant" and re.match(r"[su]\d+\[\]", line.type_text)
    return int(line.rest.partition(")")[0]) if is_integer else None
