"""LoRA that scales what is narrow, and whose second factor is part of the layer's own product."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.import_utils import is_bnb_4bit_available, is_bnb_available
from peft.tuners import lora
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .activation_checkpointing import instead_of_product, num_kept
from .frozen_weights import ShortLinear


# A TPU multiplies so many columns at once.
_LANES = 128
# Those around linear layers of bitsandbytes are defined where it is installed.
_LINEAR = (
    Linear,
    *([lora.Linear8bitLt] if is_bnb_available() else []),
    *([lora.Linear4bit] if is_bnb_4bit_available() else []),
)


class _OneProduct(torch.autograd.Function):
    """
    `[x, narrow] @ [weight, factor].T` in place of `x @ weight.T + narrow @ factor.T`, whose second term would be written,
    read and added up at the width of the layer. What `linear` computed is in `product`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        place: int,
        linear: nn.Linear,
        x: Tensor,
        narrow: Tensor,
        factor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        dtype = narrow.dtype
        ctx.save_for_backward(narrow, factor, weight, x if ctx.needs_input_grad[6] else None)
        ctx.dtype = x.dtype
        # A whole group of columns: the factor alone would decide how all of the weight lies in memory.
        padding = (0, -factor.shape[1] % _LANES)

        def compute() -> Tensor:
            wide = torch.cat([weight.to(dtype), F.pad(factor.to(dtype), padding)], 1)
            inputs = torch.cat([x.to(dtype), F.pad(narrow, padding)], -1)
            return functional_call(linear, {"weight": wide}, (inputs,))

        return instead_of_product(product, place, x.shape[-1], compute)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        narrow, factor, weight, x = ctx.saved_tensors
        rows = gradient.flatten(0, -2)

        def of(weight: Tensor, inputs: Tensor) -> Tensor:
            return (rows.t() @ inputs.flatten(0, -2).to(gradient.dtype)).to(weight.dtype)

        of_x, of_narrow = (gradient @ tensor.to(gradient.dtype) for tensor in (weight, factor))
        *_, weight_needs, bias_needs = ctx.needs_input_grad
        of_weight, of_bias = of(weight, x) if weight_needs else None, rows.sum(0) if bias_needs else None
        return None, None, None, of_x.to(ctx.dtype), of_narrow, of(factor, narrow), of_weight, of_bias


class _ScaledInside(LoraVariant):
    """
    Plain LoRA, `result + B(A(dropout(x)) * scaling)`: PEFT scales the sum's second term, as wide as the layer, and so the
    gradient of every adapter is in memory a second time. In layers that are at least as wide as their input, for many tokens,
    `result` and `B` are one product.
    """

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: Tensor, result: Tensor, **kwargs) -> Tensor:
        place, base, factor = num_kept() - 1, module.base_layer, module.lora_B[active_adapter]
        narrow = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x)) * module.scaling[active_adapter]
        if active_adapter != module.active_adapters[0] or not _is_one_product(base, x, narrow, result):
            return result + factor(narrow)
        return _OneProduct.apply(result, place, base, x, narrow, factor.weight, base.weight, base.bias)

    # What PEFT does without a variant.
    @staticmethod
    def merge_safe(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Linear, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


def _is_one_product(base: nn.Module, x: Tensor, narrow: Tensor, result: Tensor) -> bool:
    """Whether one product is right, and is less work: each time, the weight is copied, and all inputs."""
    return (
        type(base) in (nn.Linear, ShortLinear)
        and narrow.dtype == result.dtype
        and base.in_features % _LANES == 0
        and base.out_features >= base.in_features
        and x.numel() > base.in_features**2
    )


@contextmanager
def adapters_scaled_inside(models: Sequence[nn.Module]) -> Iterator[None]:
    """
    Within this context, plain LoRA of linear layers scales between its factors. With a scaling that is a power of two no bit
    changes.
    """
    variant = _ScaledInside()
    layers = [
        (module, name)
        for model in models
        for module in model.modules()
        if type(module) in _LINEAR
        for name in module.lora_A
        if name not in module.lora_variant and not module.lora_bias[name]
    ]
    for module, name in layers:
        module.lora_variant[name] = variant
    try:
        yield
    finally:
        for module, name in layers:
            # An adapter may have been deleted meanwhile.
            if module.lora_variant.get(name) is variant:
                del module.lora_variant[name]
