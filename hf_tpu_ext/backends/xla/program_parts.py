"""Loops and kernels of XLA, as operators of torch_xla's graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla.core.xla_op_registry import register
from torch_xla.experimental import scan as xla_scan

from ...temporarily import temporarily
from ..base import Backend
from ..program_parts import Kernels, Loops


class _Builder(xla_scan.Builder):
    """Counts iterations in 32 bits. TPUs have no more, and the compiler for them follows no others: it would fill results with zeros."""

    def add_param(self, val: torch.Tensor) -> int:
        if not self._params:
            val = torch.zeros((), dtype=torch.int32, device=val.device)
        return super().add_param(val)


class _Op(xb.Op):
    """Builds loops that end early, too."""

    #: Whether the loop that is built next ends when the first tensor that it carries is true.
    ends_early = False

    @classmethod
    def mkwhile(cls, operands: list[xb.Op], condition: Callable, body: Callable, **kwargs) -> xb.Op:
        def goes_on(iteration: xb.Op, is_done: xb.Op, *others: xb.Op) -> xb.Op:
            return condition(iteration, is_done, *others) & is_done.__not__()

        ends_early, cls.ends_early = cls.ends_early, False
        return super().mkwhile(operands, goes_on if ends_early else condition, body, **kwargs)


xla_scan.Builder = _Builder
xla_scan.xb = SimpleNamespace(
    **{**vars(xb), "Op": _Op, "Type": SimpleNamespace(**{**vars(xb.Type), "S64": xb.Type.S32})}
)


@partial(register, "take_rows")
def _take_rows(tensor: xb.Op, start: xb.Op, size: int) -> xb.Op:
    _, *others = tensor.shape().sizes
    return tensor.dynamic_slice([start, *[start.zeros_like()] * len(others)], [size, *others])


@partial(register, "put_block")
def _put_block(tensor: xb.Op, block: xb.Op, start: xb.Op, dim: int) -> xb.Op:
    starts = [start.zeros_like()] * tensor.shape().rank
    starts[dim] = start
    return tensor.dynamic_update_slice(block, starts)


# Smaller slices, as those of adapters, are not worth a kernel of their own.
_LEAST_KEPT = 2**18


@partial(register, "float_to_bits")
def _float_to_bits(tensor: xb.Op) -> xb.Op:
    return tensor.bitcast(xb.Type.S32)


@partial(register, "bits_to_float")
def _bits_to_float(tensor: xb.Op) -> xb.Op:
    return tensor.bitcast(xb.Type.F32)


class XLALoops(Loops):
    """Loops of XLA, whose body is recorded once."""

    in_programs = True

    def __init__(self, backend: Backend):
        self._backend = backend
        # Loops that are being recorded, one in another's body.
        self._depth = 0

    def scan(
        self,
        body: Callable,
        carry: tuple,
        tensors: tuple[torch.Tensor, ...],
        reverse: bool = False,
        until: bool = False,
    ) -> tuple[tuple, tuple]:
        # The public `scan` traces `body` with tensors that autograd cannot be run on. This is what it calls then.
        with torch.no_grad():
            if tensors[0].shape[0] == 1:
                return super().scan(body, carry, tensors, reverse)

            def one_iteration(carry: tuple, entries: tuple) -> tuple[tuple, tuple]:
                results = body(carry, entries)
                # Not before: the body may have loops of its own.
                _Op.ends_early = until
                return results

            with self._loop_in_region() if self._backend.manual_sharding.active else nullcontext():
                return xla_scan._scan_impl_pytree(one_iteration, carry, tensors, reverse)

    @contextmanager
    def _loop_in_region(self) -> Iterator[None]:
        # Arguments of the program, such as the Python numbers of a loop's body, are replicated, and the partitioner stops at
        # a loop that has them beside shards of a manual region. A loop in another's body gets them from there.
        loops, full_to_shard = self, self._backend.manual_sharding.full_to_shard

        class InRegion(_Builder):
            def add_param(self, val: torch.Tensor) -> int:
                (is_result,) = torch_xla._XLAC._check_tensor_need_materialization([val])
                return super().add_param(val if is_result or loops._depth > 1 else full_to_shard(val))

        with temporarily(self, _depth=self._depth + 1), temporarily(xla_scan, Builder=InRegion):
            yield

    def take_rows(self, tensor: torch.Tensor, start: torch.Tensor, size: int) -> torch.Tensor:
        return _take_rows(tensor, start, size=size)

    def put_block(self, tensor: torch.Tensor, block: torch.Tensor, start: torch.Tensor, dim: int) -> torch.Tensor:
        return _put_block(tensor, block, start, dim=dim)

    def prevent_hoisting(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32 or tensor.numel() < _LEAST_KEPT:
            return tensor
        # The compiler for TPU narrows floats through a barrier, too, and so the loop's whole operand. It does not integers.
        (bits,) = self._backend.separate([_float_to_bits(tensor)])
        return _bits_to_float(bits)


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
