"""Collectives of tensors on any device, by gloo on the host: those of torch_tpu connect TPU chips only."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future


NAME = "by_host"


class ByHost(dist.ProcessGroup):
    """The collectives that the trainers, FSDP2 and DTensor use."""

    def __init__(self, store, rank: int, size: int, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, opts=None):
        return self._gloo.barrier(opts or c10d.BarrierOptions())

    def allreduce(self, tensors: list[Tensor], opts):
        # gloo has no means.
        own = c10d.AllreduceOptions()
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        own.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        for tensor in tensors:
            on_host = tensor.cpu().contiguous()
            self._gloo.allreduce([on_host], own).wait()
            tensor.copy_(on_host / self.size() if is_mean else on_host)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts):
        on_host = [tensor.cpu().contiguous() for tensor in tensors]
        self._gloo.broadcast(on_host, opts).wait()
        for tensor, sent in zip(tensors, on_host, strict=True):
            tensor.copy_(sent)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts):
        for gathered, own in zip(outputs, inputs, strict=True):
            whole = torch.empty(self.size() * own.numel(), dtype=own.dtype)
            self.all_gather_single(whole, own.reshape(-1))
            for tensor, part in zip(gathered, whole.chunk(self.size()), strict=True):
                tensor.copy_(part.reshape(own.shape))
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts=None):
        on_host = torch.empty(output.shape, dtype=output.dtype)
        self._gloo._allgather_base(on_host, own.cpu().contiguous(), c10d.AllgatherOptions()).wait()
        output.copy_(on_host)
        return _done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts):
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts):
        summed = given.clone()
        self.allreduce([summed], opts)
        output.copy_(summed.chunk(self.size())[self.rank()])
        return _done(output)


def _done(result):
    future = Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


dist.Backend.register_backend(
    NAME, lambda store, rank, size, timeout: ByHost(store, rank, size, timeout), devices=["cpu", "tpu"]
)
