"""Putting a model on the chips."""

from torch import nn

from ..backends.base import Backend
from ..step.attention import attention_for
from ..step.kernels import use_static_kernels
from ..step.users_model import accept_cpu_tensors
from .plan import ShardingPlan


def place_model(model: nn.Module, backend: Backend, mesh: dict[str, int]) -> ShardingPlan:
    """
    Put a model on the device, each parameter on its chips. Where shapes are static, it computes in static shapes from now on.

    Args:
        model ([`~torch.nn.Module`]):
            Model on any device. It is changed in place.
        backend ([`Backend`]):
            The backend in use, with the mesh.
        mesh (`dict[str, int]`):
            Size of each axis.

    Returns:
        [`ShardingPlan`]: Which parameter is where.
    """
    if backend.static_shapes:
        use_static_kernels(model, attention_for(backend))
    backend.place(model)
    if backend.traces_steps:
        accept_cpu_tensors(model)
    plan = ShardingPlan(model, mesh)
    plan.apply(model, backend)
    return plan
