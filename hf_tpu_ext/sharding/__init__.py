"""How a run is spread over chips: the mesh, which parameter is on which axis, gradients that wait on their chip."""

from .mesh import AXES, describe_hosts, describe_mesh, parse_mesh, resolve_mesh
from .plan import ShardingPlan, advise_sharding


__all__ = ["AXES", "ShardingPlan", "advise_sharding", "describe_hosts", "describe_mesh", "parse_mesh", "resolve_mesh"]
