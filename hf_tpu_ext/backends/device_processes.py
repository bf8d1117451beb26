"""Processes that speak by `torch.distributed`, each with a device and rows of its own."""

import os
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import gather, sum_of_all
from .processes import ALONE, Processes, bytes_of


class DeviceProcesses(Processes):
    """
    The processes of the default group of `torch.distributed`. Where that has no collectives for the device, tensors on the device go
    `by_host`. `host_group` are the same processes with collectives for the host; by default the group itself, whose backend for the
    CPU is gloo.
    """

    own_rows = True

    def __init__(self, by_host: bool, host_group: "dist.ProcessGroup | None" = None):
        self.count, self.index = self.row_shards, self.row_shard = dist.get_world_size(), dist.get_rank()
        self.hosts = max(1, self.count // int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))
        self._by_host, self._host_group = by_host, host_group

    # ---- Values on the host ----

    def exchange(self, what: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        exchanges: list[Any] = [None] * self.count
        dist.all_gather_object(exchanges, (value, error), group=self._host_group)
        for failure in (error, *(other for _, other in exchanges)):
            if failure is not None:
                raise failure
        return [own for own, _ in exchanges]

    def raise_together(self, what: str, error: Exception | None) -> None:
        # Others may be in a collective of upstream's. Who has started these processes ends them.
        if error is not None:
            raise error

    def take_from_first(self, model: nn.Module) -> None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        # Nearly all were read from the same files, and need not be sent.
        sums = [zlib.crc32(bytes_of(tensor)) if tensor.device.type == "cpu" else 0 for tensor in tensors.values()]
        same = zip(self.most(sums), self.most([-number for number in sums]), strict=True)
        with torch.no_grad():
            for tensor, (most, least) in zip(tensors.values(), same, strict=True):
                if most != -least:
                    dist.broadcast(tensor, 0)

    # ---- Of own rows ----

    def gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return gather(tensor.unsqueeze(0) if tensor.ndim == 0 else tensor, self.count, self._by_host)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One collective for all of a dtype: by themselves, hundreds of small ones.
        means: list[Tensor] = [tensor.detach() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([means[place].reshape(-1) for place in places])
            parts = (sum_of_all(flat, self._by_host) / self.count).split([tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                means[place] = part.reshape(tensors[place].shape)
        return means

    def most(self, numbers: Sequence[int]) -> list[int]:
        return self._reduce(torch.tensor(numbers, dtype=torch.int64), dist.ReduceOp.MAX)

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self._reduce(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.SUM)

    def _reduce(self, numbers: Tensor, how: "dist.ReduceOp") -> list:
        dist.all_reduce(numbers, how, group=self._host_group)
        return numbers.tolist()

    def pass_place(self) -> str | None:
        # One small collective where nobody was told, instead of two with pickled values. What a signal tells in between is told next time.
        return super().pass_place() if self.most([self._stop_reason is not None])[0] else None


def launched_processes() -> Processes:
    """
    The processes of accelerate's group of `torch.distributed`, in which upstream averages gradients (DDP, FSDP, DeepSpeed). It is
    there once training arguments were made; before that, and where no launcher has started several processes, there is one.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and dist.is_initialized()
    return _meet() if several else ALONE


@cache
def _meet() -> Processes:
    # NCCL has no collectives for tensors on the host, and one on the device would wait for the steps under way.
    host_group = None if dist.get_backend() == dist.Backend.GLOO else dist.new_group(backend=dist.Backend.GLOO)
    return DeviceProcesses(by_host=False, host_group=host_group)
