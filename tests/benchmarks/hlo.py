"""Reads the text of compiled XLA programs (HLO): the arguments of each device, and what crosses between devices."""

import math
import re
from collections import Counter
from dataclasses import dataclass


KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)", re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*?^}", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """
    Shape of a tensor on one device.

    Args:
        dtype (`str`):
            XLA's name of the type, e.g. `"f32"`, `"bf16"`, `"pred"`.
        dims (`tuple[int, ...]`):
            Its dimensions.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        bits = 8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype)[0])
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Collective:
    """
    An operation in which devices exchange data.

    Args:
        kind (`str`):
            One of [`KINDS`].
        tensors (`tuple[Shape, ...]`):
            The tensors exchanged, as one device has them whole: what an all-gather makes, what the others take. Compilers
            combine several tensors into one operation.
    """

    kind: str
    tensors: tuple[Shape, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def describe(self) -> str:
        """
        Words for what is exchanged.

        Returns:
            `str`: E.g. `"pred[64,64]"`, `"8 x f32[512,32]"`.
        """
        counts = Counter(f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]" for tensor in self.tensors)
        return ", ".join(shape if count == 1 else f"{count} x {shape}" for shape, count in counts.items())


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """
    Read the type of an instruction.

    Args:
        text (`str`):
            As HLO writes it, e.g. `"f32[2,3]{1,0}"` or `"(bf16[8]{0}, pred[])"`.

    Returns:
        `tuple[Shape, ...]`: The shape, or those of a tuple's elements.
    """
    return tuple(
        Shape(dtype, tuple(int(size) for size in dims.split(",") if size)) for dtype, dims in _SHAPE.findall(text)
    )


def parse_collectives(text: str) -> list[Collective]:
    """
    Find the collectives of a program. Each is listed once, also inside of a loop.

    Args:
        text (`str`):
            An optimized HLO module.

    Returns:
        `list[Collective]`: In the order of the text. Of an asynchronous pair only the start is listed, and of operations
        that are parts of one exchange the first.
    """
    found: dict[object, Collective] = {}
    for computation in _COMPUTATION.finditer(text):
        # Compilers for TPU have no instruction for a reduce-scatter: they fuse an all-reduce with the slicing of its result.
        # Its channel says nothing.
        fused = computation[2].startswith("all-reduce-scatter")
        instructions = _INSTRUCTION.findall(computation[0])
        shapes = {name: parse_shapes(result) for name, result, _, _ in instructions}
        for name, _, operation, rest in instructions:
            kind = operation.removesuffix("-start")
            if kind not in KINDS:
                continue
            names = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            operands = tuple(shape for operand in names for shape in shapes[operand])
            # The result of an asynchronous start holds its operands as well, before what it makes.
            tensors = shapes[name][-len(operands) :] if kind == "all-gather" else operands
            channel = re.search(r"\bchannel_id=(\d+)", rest)
            if fused or channel is None:
                found[computation[2], name] = Collective("reduce-scatter" if fused else kind, tensors)
            else:
                found.setdefault(channel[1], Collective(kind, tensors))
    return list(found.values())


def argument_bytes(text: str) -> int:
    """
    Bytes that each device holds when a program starts.

    Args:
        text (`str`):
            An optimized HLO module, in which shapes are those of one device.

    Returns:
        `int`: Size of the entry computation's parameters.
    """
    entry = next(computation for computation in _COMPUTATION.finditer(text) if computation[1])
    return sum(
        shape.num_bytes
        for _, result, operation, _ in _INSTRUCTION.findall(entry[0])
        if operation == "parameter"
        for shape in parse_shapes(result)
    )


@dataclass(frozen=True)
class Program:
    """
    A compiled program of one device.

    Args:
        text (`str`):
            Its optimized HLO.
        weights (`frozenset[tuple[int, ...]]`):
            Shapes of the weights, whole and in parts, each with its sizes in ascending order: compilers transpose.
    """

    text: str
    weights: frozenset[tuple[int, ...]]

    @property
    def argument_bytes(self) -> int:
        """Bytes that a device holds when the program starts."""
        return argument_bytes(self.text)

    @property
    def numbers(self) -> list[Collective]:
        """Collectives of single numbers: sums for metrics and for the gradient norm."""
        return [item for item in parse_collectives(self.text) if not any(tensor.dims for tensor in item.tensors)]

    @property
    def gathers(self) -> list[Collective]:
        """All-gathers of weights."""
        return self._of_weights("all-gather")

    @property
    def scatters(self) -> list[Collective]:
        """Reduce-scatters of gradients."""
        return self._of_weights("reduce-scatter")

    @property
    def reductions(self) -> list[Collective]:
        """All-reduces of gradients."""
        return self._of_weights("all-reduce")

    @property
    def others(self) -> list[Collective]:
        """All other collectives."""
        known = [*self.numbers, *self.gathers, *self.scatters, *self.reductions]
        return [item for item in parse_collectives(self.text) if item not in known]

    def _of_weights(self, kind: str) -> list[Collective]:
        return [
            item
            for item in parse_collectives(self.text)
            if item.kind == kind and any(tuple(sorted(tensor.dims)) in self.weights for tensor in item.tensors)
        ]
