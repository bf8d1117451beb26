"""Models that transformers has quantized by bitsandbytes, on devices that bitsandbytes does not know."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from ..backends.base import Backend
from ..errors import UserError
from .packed_linear import PackedLinear4bit, PackedLinear8bit


logger = logging.getLogger(__name__)

# Scales that bitsandbytes quantizes together where it does so a second time.
_NESTED_BLOCK = 256


def pack_linear_layers(model: nn.Module, backend: Backend) -> None:
    """
    Replace the linear layers of bitsandbytes in a model, on the host, by layers with the same numbers that a backend runs.

    Raises:
        `ValueError`: A model is quantized by another method.
    """
    config = find_config(model)
    if config is None:
        return
    check_method(config)
    import bitsandbytes

    makers = {
        bitsandbytes.nn.Linear4bit: partial(_pack_4bit, backend=backend),
        bitsandbytes.nn.Linear8bitLt: _pack_8bit,
    }
    num_unpacked = 0
    for parent in list(model.modules()):
        # What accelerate would compare with the device of the run.
        vars(parent).pop("hf_device_map", None)
        for name, child in list(parent.named_children()):
            if type(child) in makers:
                layer = makers[type(child)](child)
                num_unpacked += isinstance(layer, nn.Linear)
                parent.register_module(name, layer.train(child.training))
    if num_unpacked:
        logger.warning(
            f"{num_unpacked} quantized linear layers are kept unpacked on the device, with the same numbers: their in_features "
            "are no multiple of the block of bitsandbytes (64)."
        )


def keep_gradients_on_cpu(model: nn.Module) -> Iterator[str]:
    """
    Keep the linear layers of a model that are on the CPU and quantized to 4 bits from evaluating by a kernel of AVX-512, and say
    so in a line. bitsandbytes 0.50 packs their weights for it, and it has no gradient, so that steps after an evaluation learn less.
    """
    layers = [
        module
        for module in model.modules()
        if vars(module).get("support_avx512bf16_for_cpu") and module.weight.device.type == "cpu"
    ]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
    if layers:
        yield (
            f"evaluation leaves out bitsandbytes' kernel for the CPU in {len(layers)} linear layers of 4 bits: with it, as with plain TRL, "
            "training steps after an evaluation have no gradients through them"
        )


def find_config(model: nn.Module) -> QuantizationConfigMixin | None:
    """How transformers has quantized a model when it loaded it, or the model under an adapter; `None` if it has not."""
    model = unwrap_peft_model(model)
    # transformers sets the attribute on a model that it loads quantized only.
    return model.hf_quantizer.quantization_config if vars(model).get("is_quantized") else None


def check_method(quantization_config: Any) -> None:
    """Refuse (`ValueError`) a quantization that is not known here, given as upstream takes it."""
    if isinstance(quantization_config, dict):
        method = quantization_config.get("quant_method", QuantizationMethod.BITS_AND_BYTES)
    else:
        method = quantization_config.quant_method
    if method != QuantizationMethod.BITS_AND_BYTES:
        raise UserError(
            f"Weights quantized by {QuantizationMethod(method).value} do not train on XLA. Allowed: bitsandbytes (load_in_4bit, "
            "load_in_8bit), which quantizes the original weights when they are loaded. Give the model's unquantized name."
        )


def _pack_4bit(layer: Any, backend: Backend) -> nn.Module:
    weight, shape = layer.weight, (layer.out_features, layer.in_features)
    if weight.is_meta:
        # Of a run that is planned.
        return _plan_4bit(layer, backend)
    from bitsandbytes.functional import dequantize_4bit

    state = weight.quant_state
    if layer.in_features % state.blocksize or state.nested and state.state2.blocksize != _NESTED_BLOCK:
        return _make_plain(dequantize_4bit(weight.data, state), layer.bias)
    words = weight.data.view(torch.uint8).view(layer.out_features, -1).view(torch.int32)
    packed = {"words": words.t().contiguous()}
    if state.nested:
        packed |= {
            # In rows of those that are quantized together, the last one filled up.
            "scale_codes": nn.functional.pad(state.absmax.flatten(), (0, -state.absmax.numel() % _NESTED_BLOCK)).view(
                -1, _NESTED_BLOCK
            ),
            "scale_code": state.state2.code.float(),
            "scale_scales": state.state2.absmax.float(),
            "scale_offset": state.offset.float(),
        }
    else:
        packed["scales"] = state.absmax.float().view(layer.out_features, -1).t().contiguous()
    table = tuple(state.code.tolist())
    return PackedLinear4bit(
        shape, packed, layer.bias, table, state.blocksize, state.dtype, layer.compute_dtype, backend
    )


def _plan_4bit(layer: Any, backend: Backend) -> nn.Module:
    weight, out_features, in_features = layer.weight, layer.out_features, layer.in_features
    if in_features % weight.blocksize:
        return _make_plain(weight, layer.bias)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = {"words": empty(in_features // 8, out_features, dtype=torch.int32)}
    blocks = in_features // weight.blocksize
    if weight.compress_statistics:
        groups = -(-blocks * out_features // _NESTED_BLOCK)
        packed |= {
            "scale_codes": empty(groups, _NESTED_BLOCK, dtype=torch.uint8),
            "scale_code": empty(256),
            "scale_scales": empty(groups),
            "scale_offset": empty(),
        }
    else:
        packed["scales"] = empty(blocks, out_features)
    shape = (out_features, in_features)
    from bitsandbytes.functional import get_4bit_type

    table = tuple(get_4bit_type(weight.quant_type, device="cpu").tolist())
    return PackedLinear4bit(
        shape, packed, layer.bias, table, weight.blocksize, weight.dtype, layer.compute_dtype, backend
    )


def _pack_8bit(layer: Any) -> nn.Module:
    weight = layer.weight
    if weight.is_meta:
        codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
        return PackedLinear8bit({"codes": codes, "scales": torch.empty(layer.out_features, device="meta")}, layer.bias)
    # The first call has moved them.
    codes, scales = (weight.CB, weight.SCB) if weight.CB is not None else (layer.state.CB, layer.state.SCB)
    return PackedLinear8bit({"codes": codes.data, "scales": scales.float()}, layer.bias)


def _make_plain(weight: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    layer.weight, layer.bias = nn.Parameter(weight.detach(), requires_grad=False), bias
    return layer
