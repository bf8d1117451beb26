"""A prompt that goes through the layers once for all its completions: the numbers of a row for each."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers import attention
from hf_tpu_ext.layers.attention import choose_attention, static_masks
from hf_tpu_ext.layers.layer_list import find_layers
from hf_tpu_ext.layers.layer_scan import LayerStack
from hf_tpu_ext.layers.shared_prompts import SharedPrompts, prompts_shared
from hf_tpu_ext.layers.static_kernels import use_static_kernels
from hf_tpu_ext.trainers.run.layers import VERIFIED


PROMPTS, LENGTH, COMPLETIONS, TOKENS = 2, 7, 3, 5
SHARED = SharedPrompts(LENGTH, COMPLETIONS)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}


def rows():
    """Ids and mask: prompts are padded on the left, completions on the right."""
    ids = torch.arange(PROMPTS * COMPLETIONS * (LENGTH + TOKENS)).view(-1, LENGTH + TOKENS) * 7 % 200 + 5
    ids[:, :LENGTH] = ids[::COMPLETIONS, :LENGTH].repeat_interleave(COMPLETIONS, 0)
    mask = torch.ones_like(ids)
    mask[COMPLETIONS:, :3] = 0
    for row, length in enumerate([5, 1, 3, 4, 5, 2]):
        mask[row, LENGTH + length :] = 0
    return ids, mask


def test_packed_rows():
    ids, _ = rows()
    packed = SHARED.pack(ids)
    assert packed.shape == (PROMPTS, LENGTH + COMPLETIONS * TOKENS)
    assert packed[1].tolist() == [*ids[3, :LENGTH], *ids[3, LENGTH:], *ids[4, LENGTH:], *ids[5, LENGTH:]]
    assert torch.equal(SHARED.unpack(packed), ids)
    # With heads before tokens.
    heads = torch.stack([ids, -ids], 1)[..., None]
    assert torch.equal(SHARED.pack(heads, 2).squeeze(-1), torch.stack([packed, -packed], 1))
    assert torch.equal(SHARED.unpack(SHARED.pack(heads, 2), 2), heads)
    positions = SHARED.positions(LENGTH + TOKENS, torch.device("cpu"))
    assert positions.tolist() == [[*range(LENGTH), *[*range(LENGTH, LENGTH + TOKENS)] * COMPLETIONS]]


@pytest.mark.parametrize("dim", [1, 2])
def test_gradients_are_those_of_autograd(xla, dim):
    rows = torch.randn(PROMPTS * COMPLETIONS, 4, 4, 3, dtype=torch.float64).requires_grad_()
    shared = SharedPrompts(1, COMPLETIONS)
    packed = shared.pack(rows, dim)
    gradient = torch.randn_like(packed)
    assert torch.equal(shared.unpack_gradient(gradient, dim), torch.autograd.grad(packed, rows, gradient)[0])
    packed = packed.detach().requires_grad_()
    unpacked = shared.unpack(packed, dim)
    gradient = torch.randn_like(unpacked)
    (expected,) = torch.autograd.grad(unpacked, packed, gradient)
    torch.testing.assert_close(shared.pack_gradient(gradient, dim), expected)


def test_what_is_before_each_completion():
    ids, _ = rows()
    found = SHARED.before_completions(SHARED.pack(ids)[:, :-1, None]).squeeze(-1)
    assert torch.equal(found.view(-1, TOKENS), ids[:, LENGTH - 1 : -1])


def stacked(xla, model, policy):
    parent, name = find_layers(model)
    stack = LayerStack(parent.layers, xla, policy, by_rows=True)
    stack.stack()
    parent.layers = stack


def packed_logits(xla, model):
    """Logits of the tokens of completions, by row."""
    ids, mask = (SHARED.pack(tensor) for tensor in xla.send(rows()))
    with static_masks(), prompts_shared(SHARED):
        output = model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=SHARED.positions(LENGTH + TOKENS, ids.device),
            use_cache=False,
        )
    before = SHARED.before_completions(output.last_hidden_state[:, :-1])
    return model.lm_head(before).view(PROMPTS * COMPLETIONS, TOKENS, -1)


CASES = [
    ("qwen3", {}, None, None),
    # Masks by token: scores in slices, and the kernel.
    ("mistral", {"sliding_window": 4}, "full", "slices"),
    ("qwen3", WIDE_HEADS, "full", "splash"),
]
MORE = [
    *((family, {}, "none", None) for family in VERIFIED if family != "qwen3"),
    ("mistral", {"sliding_window": 4}, "full", None),
    ("qwen3", {}, "dots", None),
    ("mistral", {"sliding_window": 4, **WIDE_HEADS}, None, "splash"),
]


@pytest.mark.parametrize(
    ("family", "sizes", "policy", "wanted"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_numbers_are_those_of_a_row_for_each(xla, tmp_path, monkeypatch, family, sizes, policy, wanted):
    """Logits and gradients, compared with those of whole rows by eager attention on CPU."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, family, **SIZES | sizes))
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids, mask = rows()
    weights = torch.randn(*ids[:, LENGTH:].shape, exact.config.vocab_size)
    # There is no loss on padding.
    weights *= mask[:, LENGTH:, None]
    expected = exact(input_ids=ids, attention_mask=mask).logits[:, LENGTH - 1 : -1]
    (expected * weights).sum().backward()

    if wanted == "slices":
        for module in ("attention", "sliced_attention"):
            monkeypatch.setattr(f"hf_tpu_ext.layers.{module}.SLICE_ELEMENTS", 2 * 12)
    use_static_kernels(model, choose_attention(model, xla, wanted or "slices"))
    assert attention.takes_shared_prompts(model)
    xla.place(model).train()
    if policy is not None:
        stacked(xla, model, policy)
    found = packed_logits(xla, model)
    (found * xla.send(weights)).sum().backward()
    real = mask[:, LENGTH:, None]
    torch.testing.assert_close(xla.fetch(found.detach()) * real, expected * real, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = xla.fetch(parameter.grad)
        if policy is not None and ".layers." in name:
            theirs = [
                exact.get_parameter(name.replace(".layers.0.", f".layers.{layer}."))
                for layer in range(SIZES["num_hidden_layers"])
            ]
            correct = torch.stack([parameter.grad for parameter in theirs])
        else:
            correct = exact.get_parameter(name).grad
        assert (gradient - correct).norm() < 1e-5 * correct.norm(), name


def test_layers_compute_each_prompt_once(xla, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, **SIZES))
    use_static_kernels(model, choose_attention(model, xla))
    xla.place(model)
    shapes = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            module.register_forward_hook(lambda _, inputs, __: shapes.add(tuple(inputs[0].shape[:2])))
    packed_logits(xla, model)
    assert shapes == {(PROMPTS, LENGTH + COMPLETIONS * TOKENS)}
