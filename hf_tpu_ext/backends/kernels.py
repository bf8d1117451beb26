"""Kernels inside a program: what another compiler made, as one operator."""

from pathlib import Path

import torch


class Kernels:
    """No kernels: models compute with what PyTorch has."""

    #: What kernels are lowered for here: `"tpu"`, or `"cpu"` where they are interpreted. `None`: there are none.
    platform: str | None = None
    #: Where they are kept, if anywhere.
    directory: Path | None = None

    def round_down(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        Round float32 towards zero, to numbers that bfloat16 holds, and keep it float32. A compiler that may compute more
        exactly than it was told would leave out a conversion there and back.
        """
        raise NotImplementedError

    def look_up(self, codes: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
        """Entries of a table by their numbers, int32; the table has a power of two of them, a few, in float32."""
        return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes]

    def call(self, program: bytes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Call a serialized program with device tensors. Autograd does not follow it. It is traced like an operator."""
        raise NotImplementedError
