"""How often the loops of a compiled XLA program (HLO) turn."""

import operator
import re
from collections.abc import Callable
from functools import cache

from .hlo import Instruction, Module


#: Loops of more turns are not counted.
MAX_TURNS = 10_000
_SAME = {"bitcast", "bitcast-convert", "convert", "copy", "reshape", "copy-start", "copy-done"}
_BINARY: dict[str, Callable[[int, int], int]] = {
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


def count_turns(module: Module, computation: str, loop: Instruction) -> int | None:
    """
    Count how often the body of a loop in a computation runs; `None` if it depends on data, or is above [`MAX_TURNS`].

    Compilers say it in the loop's `known_trip_count`, or not at all. Then the numbers that the loop's condition
    depends on are followed, turn by turn, from what the loop starts with.
    """
    if known := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest):
        return int(known[1])
    condition, body = loop.attribute("condition").strip("%"), loop.attribute("body").strip("%")
    lines = module.computations[computation]

    @cache
    def start(index: int) -> int:
        given = lines[loop.operands[0]]
        if given.opcode != "tuple":
            raise _NotKnown
        return _Evaluation(module, computation, _unknown).value(given.operands[index])

    element = start
    try:
        for turns in range(MAX_TURNS):
            if not _Evaluation(module, condition, element).result():
                return turns
            element = _Turn(module, body, element)
    except _NotKnown:
        pass
    return None


class _NotKnown(Exception):
    """A number depends on data."""


def _unknown(index: int) -> int:
    raise _NotKnown


class _Turn:
    """Numbers in the tuple that a loop hands on after one more turn, each worked out when it is asked for."""

    def __init__(self, module: Module, body: str, before: Callable[[int], int]):
        self._root = module.root(body)
        # What one turn asks for, the next does: asking here keeps turns from waiting for each other.
        known = before.values if isinstance(before, _Turn) else {}
        self._evaluation = _Evaluation(module, body, before)
        self.values: dict[int, int] = {index: self._work_out(index) for index in known}

    def __call__(self, index: int) -> int:
        if index not in self.values:
            self.values[index] = self._work_out(index)
        return self.values[index]

    def _work_out(self, index: int) -> int:
        if self._root.opcode != "tuple":
            raise _NotKnown
        return self._evaluation.value(self._root.operands[index])


class _Evaluation:
    """
    Works out integers of a computation. `argument` gives its arguments, or the elements of its only argument if that
    is a tuple.
    """

    def __init__(self, module: Module, computation: str, argument: Callable[[int], int]):
        self._module, self._argument = module, argument
        self._root, self._lines = module.root(computation).name, module.computations[computation]
        self._values: dict[str, int] = {}

    def result(self) -> int:
        """The computation's result."""
        return self.value(self._root)

    def value(self, name: str) -> int:
        """The value of an instruction."""
        if name not in self._values:
            self._values[name] = self._work_out(self._lines[name])
        return self._values[name]

    def _work_out(self, line: Instruction) -> int:
        shape = line.shapes[0] if len(line.shapes) == 1 else None
        if shape is None or shape.size != 1 or not re.fullmatch(r"pred|[su]\d+", shape.dtype):
            raise _NotKnown
        if line.opcode == "constant":
            text = line.rest.partition(")")[0].strip("{} ")
            return {"true": 1, "false": 0}[text] if shape.dtype == "pred" else _wrap(int(text), shape.dtype)
        if line.opcode == "parameter":
            return self._argument(int(line.rest.partition(")")[0]))
        if line.opcode == "get-tuple-element":
            if self._lines[line.operands[0]].opcode != "parameter":
                raise _NotKnown
            return self._argument(int(line.attribute("index")))
        if line.opcode in ("fusion", "call"):
            arguments = line.operands
            return _Evaluation(self._module, line.called[0], lambda index: self.value(arguments[index])).result()
        if line.opcode == "select":
            which, yes, no = line.operands
            return self.value(yes if self.value(which) else no)
        if line.opcode == "not":
            return _wrap(~self.value(line.operands[0]), shape.dtype)
        if line.opcode in _SAME:
            return _wrap(self.value(line.operands[0]), shape.dtype)
        if line.opcode == "compare":
            left, right = map(self.value, line.operands)
            return int(_DIRECTIONS[line.attribute("direction")](left, right))
        if line.opcode in _BINARY:
            left, right = map(self.value, line.operands)
            return _wrap(_BINARY[line.opcode](left, right), shape.dtype)
        raise _NotKnown


def _wrap(value: int, dtype: str) -> int:
    if dtype == "pred":
        return value & 1
    bits = int(dtype[1:])
    value %= 1 << bits
    return value - (1 << bits) if dtype[0] == "s" and value >> (bits - 1) else value
