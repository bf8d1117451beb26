"""PyTorch on an NVIDIA or AMD GPU."""

import os

import torch

from .base import Backend


class CUDABackend(Backend):
    """PyTorch on a GPU: every answer is what upstream does."""

    name = "cuda"
    runs_gpu_kernels = True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def chips_of_host(self) -> int:
        return torch.cuda.device_count()

    def prepare_processes(self, count: int, setting: str) -> None:
        # Several are accelerate's to prepare. One sees one GPU, or upstream's trainer would spread its batches over all.
        if count == 1 and self.chips_of_host > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]

    def prepare_host(self) -> list[str]:
        if self.chips_of_host == 1 or "WORLD_SIZE" in os.environ:
            return []
        return [
            f"One process drives {self.chips_of_host} GPUs by nn.DataParallel, which is slow. Start a process for each: accelerate "
            f"launch --multi_gpu --num_processes {self.chips_of_host} SCRIPT; or use one GPU: CUDA_VISIBLE_DEVICES=0"
        ]

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated()

    def wait(self) -> None:
        torch.cuda.synchronize()
