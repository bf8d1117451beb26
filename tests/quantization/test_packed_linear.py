"""Packed linear layers have the numbers of bitsandbytes, on XLA: weights to the bit, products to rounding."""

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, GPTQConfig

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.quantization.bitsandbytes import check_method, pack_linear_layers
from hf_tpu_ext.quantization.packed_linear import PackedLinear4bit, PackedLinear8bit, count_parameters, names_of_packed


class Quantized(nn.Module):
    """A model to transformers, of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.is_quantized = True
        self.hf_quantizer = self
        self.quantization_config = BitsAndBytesConfig(load_in_4bit=True)


def make_4bit(shape, dtype=torch.float32, quant_type="nf4", nested=False, compute_dtype=None, block=64):
    layer = bitsandbytes.nn.Linear4bit(*reversed(shape), compute_dtype=compute_dtype)
    torch.manual_seed(0)
    layer.weight = bitsandbytes.nn.Params4bit(
        torch.randn(shape, dtype=dtype) * 0.1,
        requires_grad=False,
        compress_statistics=nested,
        quant_type=quant_type,
        blocksize=block,
        module=layer,
    )
    return layer.to("cpu")


def make_8bit(shape):
    layer = bitsandbytes.nn.Linear8bitLt(*reversed(shape), has_fp16_weights=False, threshold=6.0)
    torch.manual_seed(0)
    layer.weight = bitsandbytes.nn.Int8Params(torch.randn(shape) * 0.1, requires_grad=False)
    return layer.to("cpu")


def pack(layer, backend=None):
    model = Quantized(layer)
    pack_linear_layers(model, backend or CPUBackend("for the test"))
    return model.layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_unpacked_weight_is_that_of_bitsandbytes_to_the_bit(xla, quant_type, nested, dtype):
    # The last of the groups of scales that are quantized together is not full.
    layer = make_4bit((100, 192), dtype, quant_type, nested)
    expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    packed = pack(layer, xla).to(xla.device)
    assert isinstance(packed, PackedLinear4bit)
    weight = packed.unpack(dtype, *packed.packed).t()
    assert weight.dtype == dtype
    assert torch.equal(weight.cpu(), expected)
    # Two codes to a byte, and a number for each block.
    scales = 300 if not nested else (300 + 212) / 4 + 2 + 256 + 1
    assert sum(tensor.nbytes for tensor in packed.packed) == 100 * 192 / 2 + 4 * scales


@pytest.mark.parametrize("make", [make_4bit, make_8bit])
def test_output_and_gradient_are_those_of_bitsandbytes(xla, make):
    layer = make((96, 128))
    layer.bias.requires_grad_()
    inputs, gradient = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 96)
    output = layer(inputs)
    output.backward(gradient)
    layer.bias.grad = None
    packed = pack(layer, xla).to(xla.device)
    assert isinstance(packed, (PackedLinear4bit, PackedLinear8bit))
    ours = inputs.detach().to(xla.device).requires_grad_()
    found = packed(ours)
    found.backward(gradient.to(xla.device))
    torch.testing.assert_close(found.cpu(), output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), inputs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.bias.grad.cpu(), gradient.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_product_has_the_compute_dtype_and_output_that_of_the_input(xla, compute_dtype):
    """Autocast does not change what bitsandbytes computes in."""
    layer = make_4bit((96, 128), torch.bfloat16, compute_dtype=compute_dtype)
    inputs = torch.randn(2, 5, 128)
    packed = pack(layer, xla).to(xla.device)
    with torch.autocast("xla", torch.bfloat16):
        found = packed(inputs.to(xla.device))
    assert found.dtype == torch.float32
    rounding = 1e-2 if compute_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.cpu(), layer(inputs), rtol=rounding, atol=rounding)


def test_unpacked_weight_is_not_kept_for_the_backward_pass(xla):
    packed = pack(make_4bit((96, 128)), xla).to(xla.device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        packed(torch.randn(5, 128, device=xla.device, requires_grad=True))
    assert kept
    assert all(any(tensor is parameter for parameter in packed.packed) for tensor in kept)


def test_layer_whose_blocks_go_over_rows_is_kept_unpacked_with_a_warning(caplog):
    layer = make_4bit((96, 100))
    expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    packed = pack(layer)
    assert type(packed) is nn.Linear
    assert torch.equal(packed.weight, expected)
    assert packed.bias is layer.bias
    assert "1 quantized linear layers are kept unpacked" in caplog.text


def test_blocks_of_another_size(xla):
    layer = make_4bit((96, 256), block=128)
    expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(pack(layer, xla).to(xla.device).weight.cpu(), expected)


@pytest.mark.parametrize(("make", "per_weight"), [(make_4bit, 0.5), (make_8bit, 1)])
def test_parameters_are_counted_as_what_they_are_unpacked_to(make, per_weight):
    model = Quantized(make((96, 128)))
    pack_linear_layers(model, CPUBackend("for the test"))
    assert count_parameters(model) == (96 * 128 + 96, 96)
    assert "layer.bias" not in names_of_packed(model)
    name, _ = model.layer.stored_in
    assert model.layer.get_parameter(name).nbytes == 96 * 128 * per_weight


@pytest.mark.parametrize("config", [GPTQConfig(bits=4), {"quant_method": "gptq", "bits": 4}], ids=["config", "dict"])
def test_another_method_is_an_error_with_the_fix(config):
    with pytest.raises(ValueError, match="quantized by gptq do not train on XLA.*unquantized name"):
        check_method(config)
