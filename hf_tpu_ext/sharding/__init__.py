"""How a run is spread over chips: the mesh, which parameter is on which axis, gradients that wait on their chip."""

from importlib import import_module
from typing import TYPE_CHECKING

from .mesh import AXES, describe_hosts, describe_mesh, parse_mesh, resolve_mesh


if TYPE_CHECKING:
    from .plan import ShardingPlan, advise_sharding

__all__ = ["AXES", "ShardingPlan", "advise_sharding", "describe_hosts", "describe_mesh", "parse_mesh", "resolve_mesh"]


def __getattr__(name: str):
    # A mesh is read without PyTorch, which takes more than a second to import.
    if name in __all__:
        return getattr(import_module(".plan", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
