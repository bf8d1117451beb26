import damage
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_tpu_ext.examples.tiny import make_model


def test_rounded_weights_have_few_values_and_small_errors():
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    rounded = damage.round_group_wise(weight, bits=3, group_size=32)
    groups, scales = rounded.reshape(8, 3, 32), weight.reshape(8, 3, 32).abs().amax(-1, keepdim=True) / 3
    codes = groups / scales
    assert torch.equal(codes.round().unique(), torch.arange(-3.0, 4))
    torch.testing.assert_close(codes, codes.round())
    assert ((groups - weight.reshape(8, 3, 32)).abs() <= scales / 2 * 1.0001).all()
    torch.testing.assert_close(damage.round_group_wise(rounded, 3, 32), rounded)


def test_rounding_groups_inputs_not_outputs():
    weight = torch.tensor([[1.0, 0.4, 100.0, 40.0], [0.0, 0.0, 3.0, -2.0]])
    expected = torch.tensor([[1.0, 1 / 3, 100.0, 100 / 3], [0.0, 0.0, 3.0, -2.0]])
    torch.testing.assert_close(damage.round_group_wise(weight, bits=3, group_size=2), expected)


def test_groups_have_to_fit():
    with pytest.raises(ValueError, match="96 inputs cannot be split into groups of 64"):
        damage.round_group_wise(torch.ones(2, 96), 3, 64)


def test_embeddings_and_head_keep_their_values(tmp_path):
    model, whole = (AutoModelForCausalLM.from_pretrained(make_model(tmp_path)) for _ in range(2))
    damage.damage(model, 3, 32)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, whole.get_parameter(name))}
    assert changed == {name for name, weight in whole.named_parameters() if "_proj" in name}


def test_text_of_a_row():
    prompt = "Write a docstring.\n\n```python\ndef f():\n    return 1\n```"
    row = {"prompt": [{"content": prompt}], "completion": [{"content": "Return one."}]}
    assert damage.to_text(row) == {"text": "# Return one.\ndef f():\n    return 1\n"}
