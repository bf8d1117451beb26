"""Which parameter is split over which axis of the mesh, and what that leaves on each chip."""

import math
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..backends.base import Backend
from ..formatting import format_bytes
from ..layers.attention import choose_attention
from ..layers.layer_scan import LayerStack
from ..layers.rope import use_matrix_rope
from ..layers.static_kernels import use_static_kernels
from ..quantization.bitsandbytes import pack_linear_layers
from ..step.host_io import accept_cpu_tensors
from ..vision.model import take_static_images


#: What a tensor is split by: for each dimension the name of a mesh axis, or `None`.
PartitionSpec = tuple[str | None, ...]


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter's place on the mesh. Shape and bytes are those of the whole; `shards` is the number of parts."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    trainable: bool
    spec: PartitionSpec
    shards: int


def partition_spec(shape: tuple[int, ...], mesh: dict[str, int]) -> PartitionSpec:
    """
    What a parameter is split by, for each of its dimensions.

    A matrix, or a tensor of more dimensions, is split over `fsdp` along its largest dimension that divides evenly.
    Vectors (norms, biases) stay whole on every chip: gathering them at each step costs more than they weigh.
    """
    spec: list[str | None] = [None] * len(shape)
    even = [dim for dim, size in enumerate(shape) if size % mesh["fsdp"] == 0]
    if mesh["fsdp"] > 1 and len(shape) > 1 and even:
        spec[max(even, key=lambda dim: shape[dim])] = "fsdp"
    return tuple(spec)


class ShardingPlan:
    """
    Place of every parameter of a model on a mesh.

    Gradients and optimizer moments are split as their parameter is.

    Args:
        model ([`~torch.nn.Module`]): The model, on any device.
        mesh (`dict[str, int]`): Size of each axis.

    Attributes:
        parameters (`list[PlannedParameter]`): The parameters, in the model's order; tied ones once.
    """

    def __init__(self, model: nn.Module, mesh: dict[str, int]):
        self.mesh = mesh
        self.parameters = []
        stacked_ids = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, LayerStack)
            for parameter in module.tensors.values()
        }
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if isinstance(parameter, DTensor):
                # As FSDP2 has split it.
                axes = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
                axis_of = {place.dim: axis for axis, place in axes if isinstance(place, Shard)}
                spec = tuple(map(axis_of.get, range(parameter.ndim)))
            elif id(parameter) in stacked_ids:
                # Each layer as it would be by itself.
                spec = (None, *partition_spec(shape[1:], mesh))
            else:
                spec = partition_spec(shape, mesh)
            shards = math.prod(mesh[axis] for axis in spec if axis is not None)
            num_bytes = parameter.numel() * parameter.element_size()
            self.parameters.append(PlannedParameter(name, shape, num_bytes, parameter.requires_grad, spec, shards))

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """What each parameter is split by, by its name."""
        return {parameter.name: parameter.spec for parameter in self.parameters}

    def apply(self, model: nn.Module, backend: Backend) -> None:
        """Put the parameters of the plan's model on their chips, and its buffers whole on every chip."""
        specs = self.specs
        for name, parameter in model.named_parameters():
            backend.shard(parameter, specs[name])
        for buffer in model.buffers():
            backend.shard(buffer, (None,) * buffer.ndim)

    @property
    def weight_bytes_per_chip(self) -> int:
        """Bytes of weights on each chip."""
        return sum(parameter.num_bytes // parameter.shards for parameter in self.parameters)

    def state_bytes_per_chip(self, has_average: bool = False) -> int:
        """
        Bytes that stay on each chip between steps or are there at the end of one: weights, gradients, the two moments of
        AdamW, and with `has_average` the average of the weights. Activations are not counted.
        """
        return sum(
            parameter.num_bytes // parameter.shards * (4 + has_average if parameter.trainable else 1)
            for parameter in self.parameters
        )


def place_model(model: nn.Module, backend: Backend, mesh: dict[str, int], attention: str = "auto") -> ShardingPlan:
    """
    Put a model, in place, on its chips. Where shapes are static, it computes in static shapes from now on, with the `attention`
    as [`~hf_tpu_ext.layers.attention.choose_attention`] takes it. Weights that are quantized in a way that does not run there are a
    `ValueError`.
    """
    if backend.unknown_upstream:
        pack_linear_layers(model, backend)
    if backend.static_shapes:
        use_static_kernels(model, choose_attention(model, backend, attention) if backend.traces_steps else None)
        take_static_images(model, backend)
    if backend.kernels.platform == "tpu":
        use_matrix_rope(model, backend)
    backend.place(model)
    if backend.unknown_upstream:
        accept_cpu_tensors(model)
    plan = ShardingPlan(model, mesh)
    plan.apply(model, backend)
    return plan


def advise_sharding(
    model: nn.Module, mesh: dict[str, int], memory_per_chip: int, has_average: bool = False
) -> str | None:
    """
    A line for a run whose weights and state alone, with an average of the trained weights if it `has_average`, are
    more than the `memory_per_chip` in bytes: what to set. `None` where they fit.
    """
    num_bytes = ShardingPlan(model, mesh).state_bytes_per_chip(has_average)
    if num_bytes <= memory_per_chip:
        return None
    line = (
        f"weights, gradients and optimizer state need {format_bytes(num_bytes)} of HBM per chip, which has "
        f"{format_bytes(memory_per_chip)}: "
    )
    split = ShardingPlan(model, {"data": 1, "fsdp": math.prod(mesh.values())}).state_bytes_per_chip(has_average)
    if split < num_bytes and split <= memory_per_chip:
        return f"{line}mesh=fsdp shards them over all chips, {format_bytes(split)} on each"
    return f"{line}train fewer weights (LoRA: use_peft: true) or a smaller model, or take more chips"
