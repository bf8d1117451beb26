"""Kernels as operators of torch_xla's graphs."""

from functools import cache

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

from .kernels import Kernels


@cache
def _computation(program: bytes):
    return xb.computation_from_module_proto("kernel", program)


class XLAKernels(Kernels):
    """Kernels of Pallas, lowered to HLO."""

    def __init__(self, platform: str):
        self.platform = platform

    def call(self, program: bytes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        detached = [tensor.detach() for tensor in tensors]
        found = torch_xla._XLAC._xla_user_computation("xla::kernel", detached, _computation(program))
        return tuple(found)
