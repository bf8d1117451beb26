"""Eager PyTorch on the host."""

import platform

import torch

from ..formatting import count
from .base import Backend
from .host import peak_of_process


class CPUBackend(Backend):
    """Eager PyTorch on the host: every answer is what upstream does."""

    name = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def device_name(self) -> str:
        return f"{platform.machine()} CPU, {count(torch.get_num_threads(), 'thread')}"

    def peak_memory(self) -> int | None:
        return peak_of_process()
