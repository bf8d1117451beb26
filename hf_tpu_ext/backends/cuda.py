"""PyTorch on an NVIDIA or AMD GPU."""

import torch

from .base import Backend


class CUDABackend(Backend):
    """PyTorch on a GPU: every answer is what upstream does."""

    name = "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated()

    def wait(self) -> None:
        torch.cuda.synchronize()
