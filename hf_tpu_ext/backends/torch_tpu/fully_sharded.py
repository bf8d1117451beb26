"""Weights that are split over processes, each of which drives one chip: PyTorch's FSDP2."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@cache
def _device_mesh(device_type: str, data: int, fsdp: int) -> DeviceMesh:
    # Of one dimension, or FSDP2 would exchange gradients along the other one, too.
    sizes = {"data": data, "fsdp": fsdp} if data > 1 else {"fsdp": fsdp}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def split_model(model: nn.Module, mesh: dict[str, int], device_type: str, place: Callable) -> nn.Module:
    """
    Put a model, which has the same weights on the hosts of all processes, on their devices, in place: of each weight, this one keeps
    its part along the first dimension. Parts are those of the axis `fsdp` of the mesh, and the same along `data`.

    A layer is gathered where it runs, forward and backward, and the rest of the model for as long as a step takes. Gradients are
    the means over all processes. `place` moves a module to the device in place, and keeps tied weights tied.
    """
    # Not before a backend is chosen.
    from transformers.modeling_layers import GradientCheckpointingLayer

    devices = _device_mesh(device_type, mesh["data"], mesh["fsdp"])
    # One after the other: the device need not hold more than a layer that is whole.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, model):
        fully_shard(place(module), mesh=devices)
        # What is known about a model, or about a user's code, goes by the name of its class.
        cls, (_, original) = type(module), type(module).__bases__
        cls.__name__, cls.__qualname__, cls.__module__ = original.__name__, original.__qualname__, original.__module__
    model.register_forward_hook(_split_again)
    return model


def _split_again(model: FSDPModule, *_) -> None:
    # PyTorch does so at the end of a backward pass only.
    if not torch.is_grad_enabled():
        model.reshard()


def is_split(tensor: Tensor) -> bool:
    """Whether processes hold parts of a tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is not split, gathered by all processes at once if it was. Autograd does not follow."""
    return tensor.detach().full_tensor() if is_split(tensor) else tensor


def split_as(tensor: Tensor, like: DTensor) -> DTensor:
    """Split a tensor that all processes have whole as another one is."""
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
