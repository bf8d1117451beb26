"""Goes through attention in slices, of rows that are split over as many devices as CPU_NUM_DEVICES says."""

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, eager_attention_forward

from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.layers import sliced_attention


class Attention(torch.nn.Module):
    num_key_value_groups = 2
    forward = Qwen3Attention.forward


def attend(function, tensors, gradient, mask):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(Attention(), *tensors, mask, scaling=0.5)[0]
    return output, *torch.autograd.grad(output, tensors, gradient)


def main():
    backend = select_backend("xla")
    backend.use_mesh({"data": 1, "fsdp": backend.num_chips})
    rows, length = 2 * backend.num_chips, 16
    sliced_attention.SLICE_ELEMENTS = 2 * length**2
    query, gradient = torch.randn(rows, 4, length, 8), torch.randn(rows, length, 4, 8)
    key, value = torch.randn(2, rows, 2, length, 8)
    mask = torch.full((rows, 1, length, length), torch.finfo(torch.float32).min).triu(1)
    expected = attend(eager_attention_forward, (query, key, value), gradient, mask)
    *sent, gradient, mask = backend.send_rows([query, key, value, gradient, mask], rows)
    found = attend(
        lambda *args, **kwargs: sliced_attention.sliced_attention(backend, *args, **kwargs), sent, gradient, mask
    )
    for tensor in found:
        assert tensor.device == backend.device
    for theirs, ours in zip(expected, backend.fetch(found), strict=True):
        torch.testing.assert_close(ours, theirs)


if __name__ == "__main__":
    main()
