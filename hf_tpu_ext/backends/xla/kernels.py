"""Kernels as operators of torch_xla's graphs."""

from functools import cache, partial

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla.core.xla_op_registry import register

from ..kernels import Kernels


@cache
def _computation(program: bytes):
    return xb.computation_from_module_proto("kernel", program)


@partial(register, "round_down")
def _round_down(tensor: xb.Op) -> xb.Op:
    first_bits = xb.Op.scalar(tensor.builder(), -(2**16), xb.Type.S32).broadcast(tensor.shape().sizes)
    return (tensor.bitcast(xb.Type.S32) & first_bits).bitcast(xb.Type.F32)


@partial(register, "look_up")
def _look_up(codes: xb.Op, table: tuple[float, ...]) -> xb.Op:
    # A tree of selections among constants: numbers that are data take the compiler for TPU half as long again.
    def same(value: float, kind: xb.Type) -> xb.Op:
        return xb.Op.scalar(codes.builder(), value, kind).broadcast(codes.shape().sizes)

    def choose(entries: tuple[float, ...]) -> xb.Op:
        half = len(entries) // 2
        if not half:
            return same(entries[0], xb.Type.F32)
        return is_set[half].select(choose(entries[half:]), choose(entries[:half]))

    bits = [1 << bit for bit in range(len(table).bit_length() - 1)]
    is_set = {bit: (codes & same(bit, xb.Type.S32)) != same(0, xb.Type.S32) for bit in bits}
    return choose(table)


class XLAKernels(Kernels):
    """Kernels of Pallas, lowered to HLO."""

    def __init__(self, platform: str):
        self.platform = platform

    def call(self, program: bytes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        arguments = [tensor.detach() for tensor in tensors]
        results = torch_xla._XLAC._xla_user_computation("xla::kernel", arguments, _computation(program))
        return tuple(results)

    def look_up(self, codes: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
        return _look_up(codes, table=table)

    def round_down(self, tensor: torch.Tensor) -> torch.Tensor:
        return _round_down(tensor)
