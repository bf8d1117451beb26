import damage
import kd_fidelity
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


@pytest.fixture(scope="module")
def logits():
    generator = torch.Generator().manual_seed(0)
    teacher, noise = (torch.randn(24, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    return 3 * teacher, 3 * teacher + noise


@pytest.mark.parametrize("method", kd_fidelity.METHODS)
def test_all_tokens_give_the_true_gradient(logits, method):
    coverage, results = kd_fidelity.measure(*logits, torch.eye(64), top_k=64, temperature=2.0)
    assert coverage == pytest.approx(1)
    for comparison in results[method].values():
        assert (comparison.cosine, comparison.norm_ratio) == pytest.approx((1, 1))


def test_gradients_are_those_of_the_formulas(logits):
    teacher, student = logits
    p, q, top_k = (teacher / 2).softmax(-1), (student / 2).softmax(-1), 8
    ids = teacher.topk(top_k).indices
    kept = torch.zeros_like(p).scatter(-1, ids, 1.0)
    mass, tail = (p * kept).sum(-1, keepdim=True), ((1 - kept) * p).sum(-1, keepdim=True)
    own_tail = ((1 - kept) * q).sum(-1, keepdim=True)
    expected = {
        "tail bucket (this package)": q - kept * p - (1 - kept) * q * tail / own_tail,
        "zero tail": q * mass - kept * p,
        "renormalised over the top K": kept * (q / (1 - own_tail) - p / mass),
    }
    for method, gradient in expected.items():
        loss = kd_fidelity.METHODS[method]
        found = kd_fidelity.gradient(lambda x, loss=loss: loss(teacher, x, top_k, 2.0), student)
        torch.testing.assert_close(found, gradient / 2)


def test_comparison_in_parts_is_that_of_the_whole():
    own, true = torch.randn(2, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    comparison = kd_fidelity.Comparison()
    for part in (slice(0, 3), slice(3, 10)):
        comparison.add(own[part], true[part])
    assert comparison.cosine == pytest.approx(torch.cosine_similarity(own, true, 0).item())
    assert comparison.norm_ratio == pytest.approx((own.norm() / true.norm()).item())
