"""Tensors of a device that are read one at a time, when their bytes are written to a file."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._pytree import tree_leaves


#: Gives a tensor of the device, or one row of it, on the CPU.
Read = Callable[[torch.Tensor, int | None], torch.Tensor]


def stream_tensor(tensor: torch.Tensor, read: Read) -> "torch.Tensor | StreamedTensor":
    """A [`StreamedTensor`]; or the tensor on the CPU, of one of the few dtypes that PyTorch pickles in another form."""
    return read(tensor, None) if tensor.dtype in torch.storage._new_dtypes() else StreamedTensor(tensor, read)


def read_all(data: Any) -> None:
    """Read the streamed tensors of a nested structure as [`torch.save`] does, where another host writes them."""
    for tensor in dict.fromkeys(leaf for leaf in tree_leaves(data) if isinstance(leaf, StreamedTensor)):
        tensor.read()


_IN_SAFETENSORS = {torch.float32: "F32", torch.float64: "F64"}


def in_file_order(
    tensors: Mapping[str, "torch.Tensor | StreamedTensor"],
) -> "dict[str, torch.Tensor | StreamedTensor]":
    """Tensors in the order that safetensors writes them in, which is that of [`save_safetensors`]."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def save_safetensors(
    tensors: Mapping[str, "torch.Tensor | StreamedTensor"], path: Path, metadata: dict[str, str]
) -> None:
    """
    Write the file that safetensors' `save_file` does, whose own function takes the bytes of all tensors at once. Streamed tensors,
    of float32 or float64, are read one at a time, in the order of [`in_file_order`].
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    sorted_tensors, end = in_file_order(tensors), 0
    for name, tensor in sorted_tensors.items():
        begin, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _IN_SAFETENSORS[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # What follows is aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in sorted_tensors.values():
            whole = tensor.read() if isinstance(tensor, StreamedTensor) else tensor
            file.write(whole.contiguous().reshape(-1).numpy())


class StreamedTensor:
    """
    Stands for a device tensor in what is given to [`torch.save`] or [`save_safetensors`], which write it as the CPU tensor that
    it reads, and drop that before they read the next one: the host never holds more than one of them. The file is that of CPU
    tensors. `read` is called in the order in which tensors are met; `row` is that which is meant, where it is not the whole tensor.
    """

    def __init__(self, tensor: torch.Tensor, read: Read, row: int | None = None):
        self._tensor = tensor
        self._read = read
        self._row = row

    def __getitem__(self, row: int) -> "StreamedTensor":
        assert self._row is None
        return StreamedTensor(self._tensor, self._read, row)

    def clone(self) -> "StreamedTensor":
        """As of a tensor. What is read has memory of its own."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape if self._row is None else self._tensor.shape[1:]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self) -> torch.Tensor:
        """The tensor on the CPU."""
        return self._read(self._tensor, self._row).contiguous()

    def __reduce_ex__(self, protocol: int) -> tuple:
        storage = TypedStorage(wrap_storage=_ReadWhenWritten(self), dtype=self._tensor.dtype, _internal=True)
        # The device that is written down, as of PyTorch's own fake tensors.
        storage._fake_device = torch.device("cpu")
        strides = torch.empty(self.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(self.shape), strides, False, OrderedDict())


class _ReadWhenWritten(UntypedStorage):
    """A storage without memory, which [`torch.save`] asks for its bytes."""

    def __new__(cls, tensor: StreamedTensor):
        return super().__new__(cls, tensor.shape.numel() * tensor._tensor.dtype.itemsize, device="meta")

    def __init__(self, tensor: StreamedTensor):
        # Which is there as long as what is saved. PyTorch leaves storages to the garbage collector.
        self._tensor_ref = ref(tensor)

    def cpu(self) -> UntypedStorage:
        storage = self._tensor_ref().read().untyped_storage()
        assert storage.nbytes() == self.nbytes()
        return storage
