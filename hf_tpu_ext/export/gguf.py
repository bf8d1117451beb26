"""Weights in llama.cpp's types of few bits, with the integers that they were trained with."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from ..errors import UserError
from ..quantization.fake_quantized import TrainedFor
from ..quantization.rounding import Rounding
from .files import only_export_to


#: llama.cpp's types whose blocks are an integer for each weight and one scale, by bits; with their names and file types.
_TYPES = {4: "Q4_0", 8: "Q8_0"}
#: Weights that share a scale in each of them.
_BLOCK = 32


@dataclass(frozen=True)
class GGUFExport:
    """
    A GGUF file with rounded weights: llama.cpp's type of these, how many there are, the bytes of the file, and the
    largest difference of a weight as llama.cpp has it from the one that was trained, as a share of its scale: scales
    are float16 there.
    """

    path: str
    type: str
    tensors: int
    num_bytes: int
    difference: float


def write_gguf(source: str | Path, trained_for: TrainedFor, overwrite: bool = False) -> GGUFExport:
    """
    Write a float32 GGUF file of a model, as llama.cpp's `convert_hf_to_gguf.py` makes it, anew beside it, with the matrices
    of its layers rounded as they were trained to be. Converting has put rows elsewhere and no element of a row, and groups lie
    along rows, so that the integers are those of the model. Other matrices become float16.

    Raises:
        `ValueError`: The file or the settings are not such; nothing was written.
    """
    if find_spec("gguf") is None:
        raise UserError("--gguf reads and writes GGUF files by a package that is not installed: pip install gguf")
    source = Path(source)
    rounding = trained_for.rounding()
    if rounding.bits not in _TYPES or rounding.group_size != _BLOCK or rounding.activations:
        raise UserError(
            f"llama.cpp has no type for {trained_for.describe()}: its types are int4 and int8 in groups of {_BLOCK}, for activations that "
            "are not rounded in training. Leave out --gguf."
        )
    name = _TYPES[rounding.bits]
    path = source.with_name(f"{source.stem}.{name}.gguf")
    with only_export_to(path):
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already. Add --overwrite to replace it, or move it away.")
        return _write(source, path, name, trained_for)


def _write(source: Path, path: Path, name: str, trained_for: TrainedFor) -> GGUFExport:
    # PyTorch is there by now, and gguf takes a while.
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, Keys, LlamaFileType, quants
    from gguf.constants import GGML_QUANT_VERSION, GGUFValueType
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    rounding, kind = trained_for.rounding(), GGMLQuantizationType[name]
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise UserError(
            f"--gguf {source} is no GGUF file ({error}). Make it with llama.cpp: convert_hf_to_gguf.py --outtype f32"
        ) from error
    if experts := [tensor.name for tensor in reader.tensors if _is_of_layer(tensor) and len(tensor.shape) > 2]:
        raise UserError(
            f"--gguf {source} has experts ({experts[0]}), which are no linear layers and were not rounded in training. A file that rounds the rest "
            "alone is hardly smaller. Leave out --gguf."
        )
    rounded_tensors = [tensor for tensor in reader.tensors if _is_rounded(tensor, trained_for)]
    wrong = [tensor for tensor in rounded_tensors if tensor.tensor_type != GGMLQuantizationType.F32]
    if wrong or not rounded_tensors:
        problem = f"{wrong[0].name} in {wrong[0].tensor_type.name}" if wrong else "no matrices of layers"
        raise UserError(
            f"--gguf {source} has {problem}. Other integers than those of the training would come out: make it in float32, "
            "convert_hf_to_gguf.py --outtype f32"
        )
    names, difference = {tensor.name for tensor in rounded_tensors}, 0.0
    for place, tensor in enumerate(reader.tensors):
        if tensor.name in names:
            weight = torch.from_numpy(np.array(tensor.data))
            data, type_ = _pack(rounding, weight), kind
            _, scales = rounding.quantize_weight(weight)
            differences = (torch.from_numpy(quants.dequantize(data, kind)) - rounding.round_weight(weight)).abs()
            shares = differences.unflatten(-1, (-1, _BLOCK)) / scales.abs().unsqueeze(-1)
            difference = max(difference, shares.max().item())
        elif len(tensor.shape) > 1 and tensor.tensor_type == GGMLQuantizationType.F32:
            # Files of llama.cpp have float16 where nothing is rounded.
            data, type_ = tensor.data.astype(np.float16), GGMLQuantizationType.F16
        else:
            continue
        reader.tensors[place] = tensor._replace(data=data, tensor_type=type_, n_bytes=data.nbytes)
    partial = path.with_name(f".{path.name}.partial")
    writer = GGUFWriter(partial, reader.get_field(Keys.General.ARCHITECTURE).contents())
    changes = {
        Keys.General.FILE_TYPE: MetadataDetails(GGUFValueType.UINT32, LlamaFileType[f"MOSTLY_{name}"].value),
        Keys.General.QUANTIZATION_VERSION: MetadataDetails(GGUFValueType.UINT32, GGML_QUANT_VERSION),
    }
    try:
        copy_with_new_metadata(reader, writer, changes, [])
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return GGUFExport(str(path), name, len(rounded_tensors), path.stat().st_size, difference)


def _is_rounded(tensor, trained_for: TrainedFor) -> bool:
    # Matrices of layers, but not convolutions of a few columns; and both ends where they were rounded, too.
    is_end = tensor.name in ("token_embd.weight", "output.weight")
    is_matrix = _is_of_layer(tensor) and len(tensor.shape) == 2 and tensor.shape[0] % _BLOCK == 0
    return is_matrix or (is_end and trained_for.quantize_embedding)


def _is_of_layer(tensor) -> bool:
    return tensor.name.startswith("blk.") and tensor.name.endswith(".weight")


def _pack(rounding: Rounding, weight: torch.Tensor) -> np.ndarray:
    """The blocks of a matrix as bytes, `(rows, bytes)`: of each a scale, then its integers."""
    integers, scales = rounding.quantize_weight(weight)
    blocks = integers.unflatten(-1, (-1, _BLOCK)).numpy()
    if rounding.bits == 4:
        # The second half of a block is in the upper halves of its bytes.
        low, high = np.split((blocks + 8).astype(np.uint8), 2, axis=-1)
        blocks = low | (high << 4)
    scales = scales.to(torch.float16).unsqueeze(-1).numpy()
    return np.concatenate([scales.view(np.uint8), blocks.view(np.uint8)], axis=-1).reshape(weight.shape[0], -1)
