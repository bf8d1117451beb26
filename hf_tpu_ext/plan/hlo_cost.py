"""What a compiled XLA program (HLO) does each time that it runs: its cycles, its memory traffic, its collectives."""

import re
from collections import Counter
from dataclasses import dataclass

from .hlo import KERNEL, Instruction, Module, find_collectives, parse_module
from .hlo_loops import count_trips
from .hlo_traffic import memory_bytes


# Kernels are programs of their own: what they do is not in the text, but for the arithmetic that they are named with.
_KERNEL_FLOPS = re.compile(r"\battention_kernel\[flops=(\d+)\]")


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
        # Without a group: a permutation, which sends all of it.
        others = 1.0 if item.group_size is None else 1 - 1 / item.group_size
        passes = 2 if item.kind == "all-reduce" else 1
        total = totals.setdefault(item.kind, [0, 0, 0])
        total[0] += times
        total[1] += times * item.num_bytes
        total[2] += times * round(passes * others * item.num_bytes)
    return [Exchange(kind, *total) for kind, total in totals.items()]
