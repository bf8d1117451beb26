"""How torch_xla shards tensors over a mesh: by annotation, and by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from ..program_parts import ManualSharding, ReadInRegion


_XLAC = torch_xla._XLAC
# What torch_xla says of a program that is run while that is not allowed.
_UNEXPECTED = "Unexpected execution"


def is_split(tensor: torch.Tensor) -> bool:
    """Whether no chip holds the whole of a device tensor."""
    return _XLAC._get_xla_sharding_spec(tensor) not in ("", "{replicated}")


def rows_spec(mesh: xs.Mesh, ndim: int, by_rows: bool = True) -> tuple:
    """What a tensor of `ndim` dimensions is split by: its rows over all chips, or nothing."""
    first = (mesh.axis_names,) if by_rows and ndim else (None,) * min(1, ndim)
    return first + (None,) * (ndim - 1)


def _annotate(tensor: torch.Tensor, mesh: xs.Mesh, spec: tuple) -> torch.Tensor:
    """A copy of a tensor whose place in the program is fixed. The tensor's own place is left alone."""
    copy = tensor.clone()
    _XLAC._xla_annotate_custom_sharding(copy, mesh.get_op_sharding(spec))
    return copy


def gather(tensor: torch.Tensor, mesh: xs.Mesh) -> torch.Tensor:
    """A copy that is whole on every chip."""
    return _annotate(tensor, mesh, (None,) * tensor.ndim)


class ConstrainRows(torch.autograd.Function):
    """Keeps a tensor, and its gradient, split by rows."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, mesh: xs.Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _annotate(tensor, mesh, rows_spec(mesh, tensor.ndim))

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _annotate(gradient, ctx.mesh, rows_spec(ctx.mesh, gradient.ndim)), None


class XLAManualSharding(ManualSharding):
    """Manual regions among the chips of a mesh."""

    def __init__(self, mesh: xs.Mesh):
        self._mesh = mesh
        self._chips = int(mesh.size())

    @contextmanager
    def region(self, active: bool = True) -> Iterator[None]:
        # As in `torch_xla.compile(full_graph=True)`. A part of a region is no program: the partitioner would end the process.
        is_allowed = _XLAC._get_allow_execution()
        _XLAC._set_allow_execution(is_allowed and not active)
        try:
            with super().region(active):
                yield
        except RuntimeError as error:
            if active and _UNEXPECTED in str(error):
                raise ReadInRegion("A manual region reads a value on the host.") from error
            raise
        finally:
            _XLAC._set_allow_execution(is_allowed)

    def full_to_shard(self, tensor: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
        spec = rows_spec(self._mesh, max(1, tensor.ndim), by_rows)
        full = _annotate(tensor.detach().reshape(tensor.shape or (1,)), self._mesh, spec)
        return _XLAC._spmd_full_to_shard_shape(full).reshape(
            (tensor.shape[0] // self._chips, *tensor.shape[1:]) if by_rows else tensor.shape
        )

    def shard_to_full(self, tensor: torch.Tensor) -> torch.Tensor:
        # The public `disable_manual_sharding` does the same and wraps the result in a tensor subclass.
        manual = _XLAC.OpSharding([], [], [], xs.ShardingType.MANUAL)
        part = tensor.detach().clone()
        _XLAC._mark_manual_sharding(part, manual)
        return _XLAC._spmd_shard_to_full_shape(
            part,
            self._mesh.get_op_sharding(rows_spec(self._mesh, tensor.ndim)),
            (tensor.shape[0] * self._chips, *tensor.shape[1:]),
            tensor.dtype,
        )
