"""Linear layers whose frozen weight stays packed in memory, and is unpacked where a product needs it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..backends.base import Backend
from ..layers.autocast import matmul_dtype


# 4-bit codes in a word of 32 bits.
_PER_WORD = 8


class PackedLinear(nn.Module, ABC):
    """
    A linear layer with a frozen weight that is packed. Its parameters are what [`~PackedLinear.unpack`] takes, and a bias.

    They are parameters, although they are not trained, to be split over chips and stacked by layers as others are.

    Args:
        packed (`dict[str, torch.Tensor]`): What the weight is unpacked from, by name.
        bias ([`~torch.nn.Parameter`], *optional*): The bias, `(out_features,)`.
    """

    in_features: int
    out_features: int
    #: The parameter that has the codes, and how many of them in an element.
    stored_in: ClassVar[tuple[str, int]]

    def __init__(self, packed: dict[str, Tensor], bias: nn.Parameter | None):
        super().__init__()
        self._packed = tuple(packed)
        for name, tensor in packed.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)
        #: The unpacked weight, where somebody has it in memory already.
        self.unpacked_weight: Tensor | None
        self.register_buffer("unpacked_weight", None, persistent=False)

    @abstractmethod
    def unpack(self, dtype: torch.dtype, *packed: Tensor) -> Tensor:
        """The weight, transposed: `(in_features, out_features)`, for a product with an input of `dtype`."""

    def unpack_for_gradient(self, dtype: torch.dtype, *packed: Tensor) -> Tensor:
        """As [`~PackedLinear.unpack`], for the gradient of the input."""
        return self.unpack(dtype, *packed)

    @property
    def same_for_gradient(self) -> bool:
        """Whether [`~PackedLinear.unpack`] and [`~PackedLinear.unpack_for_gradient`] give the same numbers."""
        return True

    def unpack_for_both(self, x: Tensor, *packed: Tensor) -> Tensor:
        """The weight for the product with an input, as [`~PackedLinear.unpack`]."""
        return self.unpack(self.compute_dtype_for(x), *packed)

    @property
    def packed(self) -> list[Tensor]:
        """What the weight is unpacked from."""
        return [self._parameters[name] for name in self._packed]

    @property
    def weight(self) -> Tensor:
        """The weight in float32, `(out_features, in_features)`, unpacked at every access."""
        return self.unpack(torch.float32, *self.packed).t()

    def compute_dtype_for(self, x: Tensor) -> torch.dtype:
        """What the product with an input is computed in."""
        return matmul_dtype(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.compute_dtype_for(x))
        if self.unpacked_weight is None:
            result = _Product.apply(self, x, *self.packed)
        else:
            with torch.autocast(x.device.type, enabled=False):
                result = x @ self.unpacked_weight
        return result if self.bias is None else result + self.bias.to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    # Autograd would keep the unpacked weight for the backward pass.

    @staticmethod
    def forward(ctx, layer: PackedLinear, x: Tensor, *packed: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*packed)
        with torch.autocast(x.device.type, enabled=False):
            return x @ layer.unpack(x.dtype, *packed)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        # Once: PyTorch's activation checkpointing computes them again each time.
        packed = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            input_grad = gradient @ ctx.layer.unpack_for_gradient(gradient.dtype, *packed).t()
        return None, input_grad, *[None] * len(packed)


class PackedLinear4bit(PackedLinear):
    """
    A layer of `bitsandbytes.nn.Linear4bit`, and its numbers.

    Words have 8 codes of successive input features, in the order in which bitsandbytes has them in memory, and blocks lie
    along the first dimension, too: the compiler for TPU then unpacks within the product, beside the matrix units.

    Args:
        shape (`Sequence[int]`): `(out_features, in_features)`.
        packed (`dict[str, torch.Tensor]`):
            `words`: `(in_features / 8, out_features)` int32. And the largest absolute value of each block of successive input
            features, either `scales`: `(in_features / block, out_features)` float32, or quantized a second time:
            `scale_codes` `(groups, group)` uint8, in the order of the blocks of bitsandbytes, with `scale_code` `(256,)`,
            `scale_scales` `(groups,)` and `scale_offset` `()`, float32.
        bias ([`~torch.nn.Parameter`], *optional*): The bias.
        table (`tuple[float, ...]`): The value of each of the 16 codes.
        block (`int`): Input features of a block.
        dtype (`torch.dtype`): Dtype that the weight had.
        compute_dtype (`torch.dtype`, *optional*):
            What products are computed in; by default in the dtype of their input.
        backend ([`Backend`]): The backend in use.
    """

    stored_in = ("words", _PER_WORD)

    def __init__(
        self,
        shape: Sequence[int],
        packed: dict[str, Tensor],
        bias: nn.Parameter | None,
        table: tuple[float, ...],
        block: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None,
        backend: Backend,
    ):
        super().__init__(packed, bias)
        self.out_features, self.in_features = shape
        self.block, self.dtype, self.compute_dtype = block, dtype, compute_dtype
        self._table, self._look_up = table, backend.kernels.look_up

    def compute_dtype_for(self, x: Tensor) -> torch.dtype:
        return self.compute_dtype or x.dtype

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)

    def unpack(self, dtype: torch.dtype, words: Tensor, *scales: Tensor) -> Tensor:
        scale = scales[0] if len(scales) == 1 else self._unpack_scales(*scales)
        scale = scale.unsqueeze(1).expand(-1, self.block // _PER_WORD, -1).reshape(len(words), 1, -1)
        # A byte has the first of its two codes in its upper half.
        shifts = (torch.arange(_PER_WORD, dtype=torch.int32, device=words.device) ^ 1) * 4
        codes = torch.bitwise_right_shift(words.unsqueeze(1), shifts.unsqueeze(1)) & 15
        return (self._look_up(codes, self._table) * scale).to(dtype).view(self.in_features, self.out_features)

    def unpack_for_gradient(self, dtype: torch.dtype, *packed: Tensor) -> Tensor:
        return self.unpack(self.dtype, *packed).to(dtype)

    @property
    def same_for_gradient(self) -> bool:
        return self.compute_dtype is not None and self.dtype in (torch.float32, self.compute_dtype)

    def _unpack_scales(self, codes: Tensor, code: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
        products = code.index_select(0, codes.flatten().int()).view(codes.shape) * scales.unsqueeze(1)
        # It changes no number. XLA would round a product and its sum with the offset once, and bitsandbytes rounds both.
        products = products.clamp(min=torch.finfo(torch.float32).min)
        blocks = self.in_features // self.block
        return (products + offset).flatten()[: self.out_features * blocks].view(self.out_features, blocks).t()


class PackedLinear8bit(PackedLinear):
    """
    A layer of `bitsandbytes.nn.Linear8bitLt`, as bitsandbytes trains it on CPU: the weight is unpacked, and activations are
    not quantized.

    Args:
        packed (`dict[str, torch.Tensor]`):
            `codes`: `(out_features, in_features)` int8. `scales`: `(out_features,)` float32, the largest absolute value
            of each row.
        bias ([`~torch.nn.Parameter`], *optional*): The bias.
    """

    stored_in = ("codes", 1)

    def __init__(self, packed: dict[str, Tensor], bias: nn.Parameter | None):
        super().__init__(packed, bias)
        self.out_features, self.in_features = packed["codes"].shape

    def unpack(self, dtype: torch.dtype, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.float() * (scales * (1.0 / 127.0)).unsqueeze(1)).to(dtype).t()


def unpacked_once(layer: nn.Module) -> dict[str, tuple[Callable[..., Tensor], list[str]]]:
    """
    How a layer of a model unpacks weights for its forward pass and its gradient at once, where the numbers of both are the same:
    as [`~hf_tpu_ext.layers.layer_scan.LayerStack`] takes it.
    """
    return {
        f"{path}.unpacked_weight": (module.unpack_for_both, [f"{path}.{name}" for name in module._packed])
        for path, module in layer.named_modules()
        if isinstance(module, PackedLinear) and module.same_for_gradient
    }


def names_of_packed(model: nn.Module) -> set[str]:
    """Names of the parameters of a model that packed weights are unpacked from."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, PackedLinear)
        for name in module._packed
    }


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """
    Count the parameters of a model, a tied weight once, and a packed one as what it is unpacked to: all of them, and those that
    are trained.
    """
    packed, counts = names_of_packed(model), {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            name, per_element = module.stored_in
            counts[id(module._parameters[name])] = per_element
    sizes = [
        (parameter.numel() * counts.get(id(parameter), 0 if name in packed else 1), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
    return sum(size for size, _ in sizes), sum(size for size, requires_grad in sizes if requires_grad)
