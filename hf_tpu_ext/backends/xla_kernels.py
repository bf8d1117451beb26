"""Kernels as operators of torch_xla's graphs."""

from functools import cache, partial

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla.core.xla_op_registry import register

from .kernels import Kernels


@cache
def _computation(program: bytes):
    return xb.computation_from_module_proto("kernel", program)


@partial(register, "round_down")
def _round_down(tensor: xb.Op) -> xb.Op:
    first_bits = xb.Op.scalar(tensor.builder(), -(2**16), xb.Type.S32).broadcast(tensor.shape().sizes)
    return (tensor.bitcast(xb.Type.S32) & first_bits).bitcast(xb.Type.F32)


class XLAKernels(Kernels):
    """Kernels of Pallas, lowered to HLO."""

    def __init__(self, platform: str):
        self.platform = platform

    def call(self, program: bytes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        detached = [tensor.detach() for tensor in tensors]
        found = torch_xla._XLAC._xla_user_computation("xla::kernel", detached, _computation(program))
        return tuple(found)

    def round_down(self, tensor: torch.Tensor) -> torch.Tensor:
        return _round_down(tensor)
