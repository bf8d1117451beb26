"""The mesh: how many chips share the rows, and how many share the weights."""

import math

from ..errors import UserError
from ..formatting import count


#: Axes of the mesh, outermost first. Rows of a batch are split over both; weights over `fsdp` only.
AXES = ("data", "fsdp")
_EXAMPLES = (
    "mesh='data' (weights replicated), mesh='fsdp' (weights sharded over all chips), mesh='data=2,fsdp=4' (both)"
)


def parse_mesh(mesh: str) -> dict[str, int | None]:
    """
    Read the axes of a mesh with their sizes, e.g. `"data=2,fsdp=4"`. One may come without a size (`None`): it takes
    the chips that are left. Raises `ValueError` where an axis or a size is none, or an axis is named twice.
    """
    axes: dict[str, int | None] = {}
    # A recipe may hold a number or a mapping.
    for part in str(mesh).split(","):
        name, has_size, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise UserError(f"mesh={mesh!r} has an unknown axis {name!r}. Axes: {', '.join(AXES)}. Set {_EXAMPLES}.")
        if name in axes:
            raise UserError(f"mesh={mesh!r} names the axis {name!r} twice. Set {_EXAMPLES}.")
        if has_size and not (size.isdecimal() and int(size)):
            raise UserError(
                f"mesh={mesh!r} gives the axis {name!r} the size {size!r}, which is not a positive whole number. Set "
                f"{_EXAMPLES}."
            )
        axes[name] = int(size) if has_size else None
    if list(axes.values()).count(None) > 1:
        raise UserError(f"mesh={mesh!r} leaves more than one axis without a size. Set {_EXAMPLES}.")
    return axes


def resolve_mesh(mesh: str | None, num_chips: int) -> dict[str, int]:
    """
    Give every axis of [`AXES`] its size on the chips that are there, in their order: of a mesh as [`parse_mesh`]
    takes it, data parallel by default. The product is `num_chips`. Raises `ValueError` where the mesh is malformed,
    or its sizes do not make up the chips.
    """
    axes = parse_mesh(mesh or "data")
    declared_chips = math.prod(size for size in axes.values() if size)
    sizes = {name: size or max(1, num_chips // declared_chips) for name, size in axes.items()}
    places = math.prod(sizes.values())
    if places != num_chips:
        options = [
            f"'data={num_chips // size},fsdp={size}'" for size in range(1, num_chips + 1) if not num_chips % size
        ]
        otherwise = ""
        if places > num_chips:
            otherwise = f", or run on {places} chips"
        elif places in (1, 2, 4):
            # A TPU host can be cut to these.
            otherwise = f", or set num_chips={places}"
        raise UserError(
            f"mesh={mesh!r} is for {count(places, 'chip')}, not {num_chips:,}. Set "
            f"mesh to one of {', '.join(options)}{otherwise}."
        )
    return {name: sizes.get(name, 1) for name in AXES}


def describe_hosts(mesh: dict[str, int], num_hosts: int) -> str:
    """Words for what several hosts of as many chips exchange, e.g. `"4 hosts of 4 chips: data crosses hosts, fsdp stays within one"`."""
    chips = math.prod(mesh.values()) // num_hosts
    # The chips of a host follow one another, and those of a group of `fsdp` do.
    crosses = {"data": mesh["data"] > 1, "fsdp": chips % mesh["fsdp"] > 0}
    across = [name for name in AXES if crosses[name]]
    within = [name for name in AXES if mesh[name] > 1 and not crosses[name]]
    words = f"{num_hosts} hosts of {count(chips, 'chip')}: {' and '.join(across)} "
    words += "cross hosts" if len(across) > 1 else "crosses hosts"
    return words + (f", {within[0]} stays within one" if within else "")


def describe_mesh(mesh: dict[str, int]) -> str:
    """Words for a mesh, e.g. `"fully sharded (mesh fsdp=8)"`."""
    if mesh["fsdp"] == 1:
        return f"data parallel (mesh data={mesh['data']})"
    if mesh["data"] == 1:
        return f"fully sharded (mesh fsdp={mesh['fsdp']})"
    return f"fully sharded in {mesh['data']} groups (mesh data={mesh['data']} x fsdp={mesh['fsdp']})"
