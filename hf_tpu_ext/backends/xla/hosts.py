"""How torch_xla says which hosts drive the chips of a slice, and what is split over them is read."""

import os
from collections.abc import Iterable, Iterator

import requests
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla._internal import tpu

from ...errors import UserError
from ..processes import ALONE, Processes
from ..slice_hosts import SliceHosts, read_address, read_seconds
from .sharding import gather, is_split


_XLAC = torch_xla._XLAC


def hosts_of_slice(pjrt_device: str) -> int:
    """Count the hosts of the slice that this machine is one of, before the runtime is started."""
    # A process that is told to use a part of the chips is on its own.
    if pjrt_device != "TPU" or os.environ.get("TPU_PROCESS_BOUNDS") == "1,1,1":
        return 1
    try:
        return tpu.num_tpu_workers()
    except requests.RequestException:
        # No machine of Google Cloud's.
        return 1


def join_hosts() -> Processes:
    """The hosts of the runtime, which is started. The first of them listens for the others."""
    count, index = xr.process_count(), xr.process_index()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # A launcher of one process is one as well: accelerate wraps the model for several.
    if processes > 1 or "LOCAL_RANK" in os.environ:
        raise UserError(
            f"A launcher has started this process (WORLD_SIZE={processes}), and with torch_xla one process of a host drives all "
            f"its chips ({count} of this slice): start the command itself once on every host, without torchrun or accelerate launch."
        )
    if count == 1:
        return ALONE
    address, port = read_address()
    if not address:
        address = tpu.discover_master_worker_ip() if xr.device_type() == "TPU" else "localhost"
    hosts = SliceHosts(index, count, address, port, read_seconds())
    own = [int(device.rpartition(":")[2]) for device in _XLAC._xla_get_runtime_devices()]
    hosts.chips = hosts.exchange("the chips of each host", sorted(own))
    return hosts


def read_split(tensors: Iterable[torch.Tensor], mesh: xs.Mesh, sync, keep: bool = True) -> Iterator[torch.Tensor]:
    """
    Read tensors that are split over hosts, each by a program that makes it whole on every chip and is run by all: a chip
    holds one of them at a time. `sync` runs what was traced. Unless they are to be kept, each is dropped before the next.
    """
    for tensor in tensors:
        assert is_split(tensor)
        whole = gather(tensor, mesh)
        sync(wait=True)
        xm.wait_device_ops()
        if keep:
            (read,) = _XLAC._xla_get_cpu_tensors([whole])
        else:
            read = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        del whole
        yield read
