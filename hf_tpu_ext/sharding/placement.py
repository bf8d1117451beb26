"""Putting a model on the chips."""

from torch import nn

from ..backends.base import Backend
from ..step.attention import attention_for
from ..step.kernels import use_static_kernels
from ..step.users_model import accept_cpu_tensors
from .plan import ShardingPlan


def place_model(model: nn.Module, backend: Backend, mesh: dict[str, int]) -> ShardingPlan:
    """Put a model, in place, on its chips. Where shapes are static, it computes in static shapes from now on."""
    if backend.static_shapes:
        use_static_kernels(model, attention_for(backend))
    backend.place(model)
    if backend.traces_steps:
        accept_cpu_tensors(model)
    plan = ShardingPlan(model, mesh)
    plan.apply(model, backend)
    return plan
