"""The TPUs that a run can be planned for: what people call them, what the compiler calls them, and what their chips can do."""

import difflib
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError


_CHIPS = Path(__file__).with_name("chips.json")


@dataclass(frozen=True)
class Chip:
    """
    A kind of chip, e.g. `"v5e"`, `"TPU v5e"`, with the sources of its figures.

    The rate is the highest of bfloat16 matrix products, of which an addition and a multiplication are two. The memory
    is what the compiler lets a program have of the chip's (HBM), and a link what one to a neighbour carries in one
    direction. The clock is that of the matrix units, which the compiler counts cycles by.
    """

    name: str
    title: str
    flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    clock_hz: float
    #: How chips of a host lie: of a slice of one host, or of the hosts of a larger one, which have the last of these.
    hosts: tuple[tuple[int, ...], ...]
    #: A dimension of so many chips is closed to a ring.
    ring: int
    sources: dict[str, str]


@dataclass(frozen=True)
class Topology:
    """Chips of one host, or of several: what people call them, e.g. `"v5e-8"`, and how they lie, e.g. `(2, 4)`."""

    name: str
    layout: tuple[int, ...]
    chip: Chip

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return math.prod(self.layout)

    @property
    def host_layout(self) -> tuple[int, ...]:
        """How the chips of a host lie."""
        return self.layout if self.layout in self.chip.hosts else self.chip.hosts[-1]

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.num_chips // math.prod(self.host_layout)

    @property
    def hosts(self) -> list[list[int]]:
        """The chips of each host, numbered as the compiler does: along the first dimension first."""
        chips_of_hosts: dict[tuple[int, ...], list[int]] = {}
        places = itertools.product(*(range(size) for size in reversed(self.layout)))
        for chip, place in enumerate(places):
            host = tuple(at // size for at, size in zip(place, reversed(self.host_layout), strict=True))
            chips_of_hosts.setdefault(host, []).append(chip)
        return list(chips_of_hosts.values())

    @property
    def compiler_name(self) -> str:
        """What the compiler calls it, e.g. `"v5e:2x4"`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.layout))}"

    @property
    def compiler_options(self) -> dict[str, str | int | tuple[int, ...]]:
        """Keyword arguments of `jax.experimental.topologies.get_topology_desc`."""
        if self.num_chips > 1:
            return {"topology_name": self.compiler_name}
        # A host has several chips unless this is said.
        return {"topology_name": self.compiler_name, "chips_per_host_bounds": (1, 1, 1), "num_slices": 1}

    @property
    def exchange_bytes_per_second(self) -> float:
        """What the chip with the fewest neighbours can send, and can receive at the same time; `0.0` for one chip."""
        # Those at the corners: one neighbour along each dimension, but in a ring.
        links = sum((size > 1) + (size == self.chip.ring) for size in self.layout)
        return links * self.chip.link_bytes_per_second


def read_topologies() -> dict[str, Topology]:
    """Read what is known, by all names, those of people first."""
    by_name: dict[str, Topology] = {}
    aliases: dict[str, Topology] = {}
    for name, values in json.loads(_CHIPS.read_text(encoding="utf-8")).items():
        layouts, others = values.pop("topologies"), values.pop("aliases")
        values["hosts"] = tuple(map(_read_layout, values["hosts"]))
        chip = Chip(name, **values)
        for title, layout in layouts.items():
            by_name[title] = topology = Topology(title, _read_layout(layout), chip)
            aliases[topology.compiler_name] = topology
        aliases |= {alias: by_name[title] for alias, title in others.items()}
    return by_name | aliases


def _read_layout(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def find_chip(title: str) -> Chip | None:
    """The chip of a title that a machine gives it, e.g. `"TPU v5e"`; `None` where it is not known."""
    return next((topology.chip for topology in read_topologies().values() if topology.chip.title == title), None)


def find_topology(name: str) -> Topology:
    """The TPU of a name, e.g. `"v5e-8"`, `"v5litepod-8"`, `"v5e:2x4"`. Raises `ValueError` where there is none."""
    topologies = read_topologies()
    key = name.strip().lower()
    if key in topologies:
        return topologies[key]
    names = list(dict.fromkeys(topology.name for topology in topologies.values()))
    close = dict.fromkeys(topologies[match].name for match in difflib.get_close_matches(key, topologies, n=5))
    hint = f"Closest: {', '.join(close)}. " if close else ""
    raise UserError(
        f"topology {name!r} is not known. {hint}These are, with the number of chips after the dash (of v5p: of its cores, two "
        f"a chip): {', '.join(names)}."
    )
