"""The processes that torchrun or `accelerate launch` has started, on devices whose steps are upstream's."""

import os
from functools import cache

import torch.distributed as dist

from .ranks import Ranks


_ALONE = Ranks()


def launched_ranks() -> Ranks:
    """
    The processes of accelerate's group of `torch.distributed`, in which upstream averages gradients (DDP, FSDP, DeepSpeed). It is
    there once training arguments were made; before that, and where no launcher has started several processes, there is one.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and dist.is_available() and dist.is_initialized()
    return _meet() if several else _ALONE


@cache
def _meet() -> Ranks:
    from .process_ranks import ProcessRanks

    # NCCL has no collectives for tensors on the host, and one on the device would wait for the steps under way.
    host_group = None if dist.get_backend() == dist.Backend.GLOO else dist.new_group(backend=dist.Backend.GLOO)
    return ProcessRanks(by_host=False, host_group=host_group)
