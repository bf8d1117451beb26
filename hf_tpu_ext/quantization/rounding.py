"""Rounding to few bits that is differentiated as if there were none, with torchao's numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor


#: What weights are rounded to: torchao's `torch.int2` to `torch.int8`.
WEIGHT_DTYPES = tuple(f"int{bits}" for bits in range(2, 9))
#: What activations are rounded to, besides not at all.
ACTIVATION_DTYPES = ("int8",)
#: How the scale of a group of weights is chosen.
SCALES = ("max", "mse")
#: With `"mse"`: ranges to try, of the one that nothing is clamped in. Others bring less than 3 % of the error.
_RANGES = (1.0, 0.9, 0.8, 0.7)
_EPS = torch.finfo(torch.float32).eps


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """
    Split float32 numbers into what bfloat16 can hold of them, and the rest. By Veltkamp's splitting: XLA leaves out a
    conversion to bfloat16 and back.
    """
    wide = values * (2**16 + 1)
    short = wide - (wide - values)
    return short, values - short


class _Rounded(torch.autograd.Function):
    """
    `scale * (clamp(round(values / scale) + zero) - zero)`, whose gradient is that of the values where nothing was clamped
    (straight-through, https://huggingface.co/papers/1308.3432), and 0 where it was.
    """

    @staticmethod
    def forward(ctx, values: Tensor, scale: Tensor, zero: Tensor | int, lowest: int, highest: int) -> Tensor:
        # In torchao's order of operations: with another one, values half way between two would go the other way.
        integers = torch.round(values * (1.0 / scale)) + zero
        ctx.save_for_backward((integers >= lowest) & (integers <= highest))
        return (integers.clamp(lowest, highest) - zero) * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (is_inside,) = ctx.saved_tensors
        return torch.where(is_inside, gradient, torch.zeros_like(gradient)), None, None, None, None


def _divide(values: Tensor, divisor: float) -> Tensor:
    """Divide values of 0 and more as it is written."""
    if values.device.type in ("cpu", "xla"):
        return values / divisor
    # CUDA multiplies by the reciprocal of a number, which is rounded, and so does a compiler with what it knows to be constant.
    # The largest element of each group lies between two integers, so that another one would come out.
    return values / torch.where(values >= 0, divisor, torch.nan)


@dataclass
class Rounding:
    """
    How weights are rounded, as torchao's `IntxWeightOnlyConfig` does: symmetrically, with one scale for each group of the
    elements of a row; and activations, as its `Int8DynamicActivationIntxWeightConfig` does: to int8, with a scale and a
    zero point for each token.

    All of it is computed in float32, whatever the dtype of a tensor is: a program on XLA keeps intermediate results of
    bfloat16 in more bits, and other integers than elsewhere would come out.

    Its modules are traced into one program, while torchao's keep the scales of each call, tensors that a replayed step
    would leave behind.

    Args:
        bits (`int`): Bits of an element, 2 to 8.
        group_size (`int`): Elements that share a scale.
        activations (`bool`, *optional*, defaults to `False`): Whether activations are rounded to int8.
        on (`bool`, *optional*, defaults to `True`): Whether anything is rounded, for the time being.
        scale (`str`, *optional*, defaults to `"max"`):
            One of [`SCALES`]: by the largest magnitude of a group, as torchao does; or with the least squared error, which is
            found anew for the weights of each step. Such a scale may be negative, and is a number of bfloat16, so that an
            export has it as it was in training.
    """

    bits: int
    group_size: int
    activations: bool = False
    on: bool = True
    scale: str = "max"

    def round_weight(self, weight: Tensor) -> Tensor:
        """Round a matrix, in groups along its last dimension, which the size of a group divides. Returns float32."""
        groups, scale = self._find_scale(weight)
        return _Rounded.apply(groups, scale, 0, self._lowest, -self._lowest - 1).flatten(-2)

    @torch.no_grad()
    def quantize_weight(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The integers of a rounded matrix, as int8 of its shape, and the scales of its groups: `(rows, groups)`."""
        groups, scale = self._find_scale(weight)
        return self._to_integers(groups, scale).flatten(-2).to(torch.int8), scale.squeeze(-1)

    @property
    def _lowest(self) -> int:
        return -(2 ** (self.bits - 1))

    def _find_scale(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        groups = weight.float().unflatten(-1, (-1, self.group_size))
        with torch.no_grad():
            if self.scale == "mse":
                return groups, self._search(groups)
            scale = _divide(groups.abs().amax(-1, keepdim=True), -self._lowest - 0.5)
            return groups, scale.clamp(min=_EPS)

    def _search(self, groups: Tensor) -> Tensor:
        highest, lowest = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        # The weight of the largest magnitude becomes the lowest integer, since there is no such highest one.
        largest = torch.where(highest > -lowest, highest, lowest)
        largest = torch.where(largest.abs() < _EPS, _EPS, largest)
        explained_sum, scale = torch.zeros_like(largest), torch.full_like(largest, _EPS)
        for range in _RANGES:
            integers = self._to_integers(groups, range / self._lowest * largest)
            # Of these integers the scale of the least squared error, which is the sum of squares less what is explained.
            product, squares = (groups * integers).sum(-1, keepdim=True), integers.square().sum(-1, keepdim=True)
            fitted_scale = product / squares.clamp(min=1)
            is_better = product * fitted_scale > explained_sum
            explained_sum, scale = (
                torch.where(is_better, product * fitted_scale, explained_sum),
                torch.where(is_better, fitted_scale, scale),
            )
        return split(scale)[0]

    def _to_integers(self, groups: Tensor, scale: Tensor) -> Tensor:
        return (groups * (1.0 / scale)).round_().clamp_(self._lowest, -self._lowest - 1)

    def round_activation(self, hidden: Tensor) -> Tensor:
        """Round each token of `(..., features)`, where activations are rounded. The dtype stays."""
        if not self.activations:
            return hidden
        values = hidden.float()
        with torch.no_grad():
            lowest, highest = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
            scale = _divide(highest - lowest, 255.0).clamp(min=_EPS)
            zero = (-128 - torch.round(lowest / scale)).clamp(-128, 127)
        return _Rounded.apply(values, scale, zero, -128, 127).to(hidden.dtype)
