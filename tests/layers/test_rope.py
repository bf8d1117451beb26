"""Halves of heads that are swapped by a product are those that upstream swaps."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.glm import modeling_glm
from transformers.models.qwen3 import modeling_qwen3

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.rope import use_matrix_rope


@pytest.fixture
def rotate(xla, tmp_path):
    """The function of Qwen3's code, replaced."""
    upstream = modeling_qwen3.rotate_half
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, hidden_size=32, num_hidden_layers=1))
    use_matrix_rope(model, xla)
    # A second run, of another model of the kind.
    use_matrix_rope(model, xla)
    assert modeling_qwen3.rotate_half.upstream is upstream
    yield modeling_qwen3.rotate_half
    modeling_qwen3.rotate_half = upstream


@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 0), (torch.float32, 2**-15)])
def test_output_and_gradient(xla, rotate, dtype, error):
    tensor, gradient = torch.randn(2, 2, 3, 5, 16).to(dtype)
    expected_of = tensor.clone().requires_grad_()
    expected = rotate(expected_of)
    assert torch.equal(expected, rotate.upstream(tensor)), "on the host it is upstream's"
    expected.backward(gradient)
    sent, gradient = xla.send([tensor, gradient])
    sent.requires_grad_()
    with torch.autocast("xla", torch.bfloat16):
        found = rotate(sent)
    found.backward(gradient)
    for ours, theirs in zip(xla.fetch([found, sent.grad]), (expected, expected_of.grad), strict=True):
        assert ours.dtype == dtype
        assert ((ours - theirs).abs() <= error * theirs.abs()).all()


def test_computed_in_float32_all_bits_are_kept(xla, rotate):
    tensor = torch.randn(2, 3, 5, 16)
    assert torch.equal(xla.fetch(rotate(xla.send(tensor))), rotate.upstream(tensor))


def test_other_functions_of_the_name_stay(xla):
    """GLM's pairs are neighbours."""
    before = modeling_glm.rotate_half
    model = modeling_glm.GlmForCausalLM(
        modeling_glm.GlmConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9, pad_token_id=0, head_dim=8
        )
    )
    use_matrix_rope(model, xla)
    assert modeling_glm.rotate_half is before
