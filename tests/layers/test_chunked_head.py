"""The chunked head gives upstream's numbers, in a program that does not grow."""

import re
from functools import partial

import pytest
import torch
import torch_xla
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.layers import chunked_head
from hf_tpu_ext.layers.chunked_head import LoopedLogProbs


TOKENS, HIDDEN, VOCABULARY = 24, 16, 150
CPU = CPUBackend("for the test")
SETTINGS = {
    "plain": (1.0, None, 1.0),
    "temperature": (0.7, None, 1.0),
    "scale": (0.7, None, 0.25),
    "softcap_and_scale": (1.0, 5.0, 0.25),
    "all": (0.7, 5.0, 0.25),
}


@pytest.fixture(autouse=True)
def slices(monkeypatch):
    """Four slices of 32, and 22 columns that are left."""
    monkeypatch.setattr(chunked_head, "_TILE_ELEMENTS", TOKENS * 32)
    monkeypatch.setattr(chunked_head, "_LEAST_SLICE", 16)


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=generator),
        "weight": torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.3,
        "bias": torch.randn(VOCABULARY, generator=generator),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        "by_log_prob": torch.rand(TOKENS, generator=generator),
        "by_entropy": torch.rand(TOKENS, generator=generator),
    }


def reference(batch, temperature, softcap, scale):
    """Everything at once in float64."""
    batch = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    leaves = {name: batch[name].requires_grad_() for name in ("hidden", "weight", "bias")}
    logits = (batch["hidden"] @ batch["weight"].T + batch["bias"]) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    outputs = (
        log_probs.gather(-1, batch["targets"][:, None])[:, 0],
        entropy,
        (2 * log_probs).logsumexp(-1),
        logits.mean(-1),
        logits.argmax(-1) == batch["targets"],
    )
    total = (outputs[0] * batch["by_log_prob"]).sum() + (entropy * batch["by_entropy"]).sum()
    return outputs, torch.autograd.grad(total, leaves.values())


@pytest.mark.parametrize("is_lazy", [False, True], ids=["cpu", "xla"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_numbers_are_those_of_all_logits_at_once(xla, batch, settings, is_lazy):
    backend = xla if is_lazy else CPU
    sent = backend.send({name: tensor.clone() for name, tensor in batch.items()})
    leaves = [sent[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    outputs = LoopedLogProbs.apply(backend, *leaves, sent["targets"], settings[0], 64, *settings[1:])
    total = (outputs[0] * sent["by_log_prob"]).sum() + (outputs[1] * sent["by_entropy"]).sum()
    found = backend.fetch([outputs, torch.autograd.grad(total, leaves)])
    for mine, other in zip([*found[0], *found[1]], sum(reference(batch, *settings), ()), strict=True):
        if mine.dtype == torch.bool:
            assert torch.equal(mine, other)
        else:
            assert (mine - other).norm() / other.norm() < 1e-6
    assert [output.requires_grad for output in outputs] == [True, True, False, False, False]


def test_bfloat16_products_are_as_exact_as_upstreams(xla, batch, monkeypatch):
    """Under autocast: sums and gradients stay float32. Slices are converted in their turn, which small ones would not be."""
    monkeypatch.setattr("hf_tpu_ext.backends.xla.program_parts._LEAST_KEPT", 1)
    sent = xla.send({name: tensor.clone() for name, tensor in batch.items()})
    no_bias = {**batch, "bias": torch.zeros(VOCABULARY), "by_entropy": torch.zeros(TOKENS)}
    outputs, gradients = reference(no_bias, 1.0, None, 1.0)
    exact = [*outputs[:2], *gradients[:2]]

    def errors(apply):
        leaves = [sent[name].detach().requires_grad_() for name in ("hidden", "weight")]
        with torch.autocast("xla", torch.bfloat16):
            outputs = apply(*leaves, None, sent["targets"], 1.0, 64, None, 1.0, ("entropy", "is_top1"))
        (outputs[0] * sent["by_log_prob"]).sum().backward()
        assert [output is None for output in outputs] == [False, False, True, True, False]
        found = xla.fetch([*outputs[:2], *(leaf.grad for leaf in leaves)])
        assert {tensor.dtype for tensor in found} == {torch.float32}
        return [(mine - other).norm() / other.norm() for mine, other in zip(found, exact, strict=True)]

    mine, upstreams = errors(partial(LoopedLogProbs.apply, xla)), errors(ChunkedLogProbFunction.apply)
    for error, upstream in zip(mine, upstreams, strict=True):
        assert 1e-6 < error < 1.2 * upstream


@pytest.mark.parametrize("by_entropy", [False, True], ids=["log_probs", "and_entropy"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_numbers_of_a_frozen_head(xla, batch, settings, by_entropy):
    given = batch if by_entropy else {**batch, "by_entropy": torch.zeros(TOKENS)}
    sent = xla.send({name: tensor.clone() for name, tensor in given.items()})
    hidden = sent["hidden"].requires_grad_()
    outputs = LoopedLogProbs.apply(
        xla, hidden, sent["weight"], sent["bias"], sent["targets"], settings[0], 64, *settings[1:]
    )
    total = (outputs[0] * sent["by_log_prob"]).sum()
    if by_entropy:
        total = total + (outputs[1] * sent["by_entropy"]).sum()
    (gradient,) = torch.autograd.grad(total, [hidden])
    programs = torch_xla._XLAC._get_xla_tensors_hlo([gradient])
    assert programs.count(" while(") == (1 if not by_entropy and settings[1] is None else 2)
    expected = reference(given, *settings)[1][0]
    assert (xla.fetch(gradient) - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("sure", [1, 8, 30], ids=["unsure", "half_sure", "sure"])
def test_a_frozen_head_in_bfloat16_is_as_exact_as_upstream(xla, batch, sure):
    """Also where the target is so likely that its row and the mean of the rows are nearly the same."""
    rows = batch["weight"].bfloat16().float()
    towards = torch.nn.functional.normalize(rows[batch["targets"]], dim=-1)
    given = {**batch, "weight": rows, "hidden": (batch["hidden"] + sure * towards).bfloat16().float()}
    exact = reference({**given, "bias": torch.zeros(VOCABULARY), "by_entropy": torch.zeros(TOKENS)}, 1.0, None, 1.0)[
        1
    ][0]
    sent = xla.send({name: tensor.clone() for name, tensor in given.items()})

    def error(apply):
        hidden = sent["hidden"].detach().requires_grad_()
        with torch.autocast("xla", torch.bfloat16):
            log_probs = apply(hidden, sent["weight"], None, sent["targets"], 1.0, 64, None, 1.0, ())[0]
        (log_probs * sent["by_log_prob"]).sum().backward()
        return (xla.fetch(hidden.grad) - exact).norm() / exact.norm()

    assert error(partial(LoopedLogProbs.apply, xla)) < 1.1 * error(ChunkedLogProbFunction.apply)


def test_a_frozen_head_costs_no_gradient(xla, batch):
    """LoRA: only the hidden states have one."""
    programs = {}
    for trains in (False, True):
        sent = xla.send({name: batch[name].clone() for name in ("hidden", "weight", "targets")})
        hidden, weight = sent["hidden"].requires_grad_(), sent["weight"].requires_grad_(trains)
        LoopedLogProbs.apply(xla, hidden, weight, None, sent["targets"], 1.0, 64)[0].sum().backward()
        wanted = [tensor.grad for tensor in (hidden, weight) if tensor.grad is not None]
        assert len(wanted) == 1 + trains
        programs[trains] = torch_xla._XLAC._get_xla_tensors_hlo(wanted)
    whole = re.compile(rf"= f32\[{VOCABULARY},{HIDDEN}\]\S* dynamic-update-slice\(")
    assert whole.search(programs[True]) and not whole.search(programs[False])


def program_of(xla, tokens, vocabulary):
    sent = xla.send({"hidden": torch.zeros(tokens, HIDDEN), "targets": torch.zeros(tokens, dtype=torch.int64)})
    hidden = sent["hidden"].requires_grad_()
    weight = xla.send(torch.zeros(vocabulary, HIDDEN)).requires_grad_()
    outputs = LoopedLogProbs.apply(
        xla, hidden, weight, None, sent["targets"], 1.0, 64, None, 1.0, ("entropy", "is_top1")
    )
    outputs[0].sum().backward()
    return torch_xla._XLAC._get_xla_tensors_hlo([*outputs[:2], outputs[4], hidden.grad, weight.grad])


def test_the_program_does_not_grow(xla):
    small, large = program_of(xla, TOKENS, 150), program_of(xla, 4 * TOKENS, 32 * 40 + 22)
    assert small.count(" = ") == large.count(" = ")
    assert large.count(" while(") == 2


def test_no_tensor_has_a_logit_for_each_token_and_word(xla):
    vocabulary = 32 * 40
    program = program_of(xla, TOKENS, vocabulary)
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\b[a-z]+\d*\[(\d+(?:,\d+)*)\]", program)}
    assert (TOKENS, 32) in shapes
    assert max(torch.Size(shape).numel() for shape in shapes) <= vocabulary * HIDDEN < TOKENS * vocabulary


def test_every_output_is_upstreams():
    assert OPTIONAL_OUTPUTS == ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
