"""Losses and gradients against plain float64, on eager CPU and on XLA."""

import itertools

import pytest
import torch

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.distillation import fused_head
from hf_tpu_ext.distillation.fused_head import Distillation, Head, distill
from hf_tpu_ext.distillation.losses import KD_LOSSES, TopK, divergence, full_divergence, top_k_divergence


# XLA is started before the first backward pass of the process.
pytestmark = pytest.mark.usefixtures("xla")
TOKENS, HIDDEN, VOCABULARY = 50, 12, 150
CPU = CPUBackend("the reference")


def naive_divergence(p, q, kd_loss, beta):
    """The definitions, on probabilities."""

    def kl(first, second):
        return torch.where(first > 0, first * (first / second).log(), 0).sum(-1)

    if kd_loss == "forward_kl":
        return kl(p, q)
    if kd_loss == "reverse_kl":
        return kl(q, p)
    assert kd_loss == "jsd", f"no reference of {kd_loss!r}"
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def naive_kd(teacher_logits, logits, temperature, top_k, kd_loss, beta):
    p, q = (teacher_logits / temperature).softmax(-1), (logits / temperature).softmax(-1)
    if top_k is not None and top_k < p.shape[-1]:
        best, ids = p.topk(top_k)
        rest = torch.ones_like(p).scatter(-1, ids, 0)
        # The bucket is a sum, in the reference too: 1 - sum(best) would be its rounding.
        p = torch.cat([best, (p * rest).sum(-1, keepdim=True)], -1)
        q = torch.cat([q.gather(-1, ids), (q * rest).sum(-1, keepdim=True)], -1)
    return naive_divergence(p, q, kd_loss, beta)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    mask = torch.rand(TOKENS, generator=generator) > 0.3
    mask[:7] = False  # a row that starts late, as ragged batches have
    return {
        "hidden": draw(TOKENS, HIDDEN),
        "weight": draw(VOCABULARY, HIDDEN) * 0.7,
        "bias": draw(VOCABULARY),
        "teacher_hidden": draw(TOKENS, 8),
        "teacher_weight": draw(VOCABULARY, 8),
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        "mask": mask.float(),
    }


def check(batch, backend, temperature, top_k, kd_loss, is_cached, alpha=0.7):
    student = ("hidden", "weight", "bias")
    reference = {name: batch[name].double().requires_grad_() for name in student}
    teacher_logits = batch["teacher_hidden"].double() @ batch["teacher_weight"].double().T
    logits = reference["hidden"] @ reference["weight"].T + reference["bias"]
    ce = -logits.log_softmax(-1).gather(-1, batch["targets"][:, None])[:, 0]
    # With 0.5, it would not matter which of the two is the teacher's.
    kd = naive_kd(teacher_logits, logits, temperature, top_k, kd_loss, beta=0.3)
    mask = batch["mask"].double()
    expected = (((1 - alpha) * ce + alpha * temperature**2 * kd) * mask).sum() / mask.sum()
    expected.backward()

    sent = {
        name: tensor.requires_grad_(name in student)
        for name, tensor in backend.send({name: tensor.clone() for name, tensor in batch.items()}).items()
    }
    if is_cached:
        teacher = TopK.of(teacher_logits, top_k or VOCABULARY, temperature)
        teacher = TopK(teacher.ids.int(), teacher.log_probs.float(), teacher.log_tail.float())
        teacher = TopK(*(backend.send(value) for value in teacher))
    else:
        teacher = Head(sent["teacher_hidden"], sent["teacher_weight"])
    head = Head(sent["hidden"], sent["weight"], sent["bias"])
    settings = Distillation(temperature, kd_loss, 0.3, None if is_cached else top_k)
    terms = distill(head, sent["targets"], teacher, settings, backend)
    per_token = -(1 - alpha) * terms.log_probs + alpha * temperature**2 * terms.kd
    loss = (per_token * sent["mask"]).sum() / sent["mask"].sum()
    loss.backward()
    fetched = backend.fetch({"loss": loss, **{name: sent[name].grad for name in student}})
    assert fetched["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    for name in student:
        error = (fetched[name].double() - reference[name].grad).norm() / reference[name].grad.norm()
        assert error < 1e-6, f"gradient of {name}"
    return terms, teacher_logits, logits


@pytest.mark.parametrize("is_cached", [False, True], ids=["online", "cached"])
@pytest.mark.parametrize("kd_loss", KD_LOSSES)
def test_gradients_on_cpu(batch, kd_loss, is_cached, monkeypatch):
    monkeypatch.setattr(fused_head, "_MOST_TOKENS", 16)  # four chunks, the last one completed
    for temperature, top_k in itertools.product((1.0, 2.0, 4.0), (1, 16, 128, None)):
        check(batch, CPU, temperature, top_k, kd_loss, is_cached)


@pytest.mark.parametrize(
    ("temperature", "top_k", "is_cached"), [(1.0, 1, False), (2.0, 16, True), (4.0, 128, False), (2.0, None, True)]
)
@pytest.mark.parametrize("kd_loss", KD_LOSSES)
def test_gradients_on_xla(xla, batch, kd_loss, temperature, top_k, is_cached, monkeypatch):
    monkeypatch.setattr(fused_head, "_MOST_TOKENS", 16)
    check(batch, xla, temperature, top_k, kd_loss, is_cached)


def test_what_is_logged(batch):
    terms, teacher_logits, logits = check(batch, CPU, 2.0, 16, "forward_kl", is_cached=True)
    assert torch.equal(terms.is_top1, (logits.argmax(-1) == batch["targets"]).float())
    assert torch.equal(terms.agreement, (logits.argmax(-1) == teacher_logits.argmax(-1)).float())
    best = (teacher_logits / 2).softmax(-1).topk(16).values.sum(-1)
    torch.testing.assert_close(terms.coverage.double(), best, rtol=1e-5, atol=0)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(terms.entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-6)
    assert not terms.entropy.requires_grad and terms.kd.requires_grad


def test_rows_that_pad_the_teacher_are_no_tokens(batch):
    bias = torch.zeros(len(batch["teacher_weight"]) + 8)
    bias[-8:] = 1e4
    padded = torch.cat([batch["teacher_weight"], torch.zeros(8, batch["teacher_weight"].shape[1])])
    head = Head(batch["hidden"], batch["weight"], batch["bias"])
    terms, expected = (
        Distillation().terms(head, batch["targets"], Head(batch["teacher_hidden"], *teacher), torch.float32)
        for teacher in ((padded, bias), (batch["teacher_weight"],))
    )
    assert expected.agreement.any() and torch.equal(terms.agreement, expected.agreement)


@pytest.mark.parametrize("kd_loss", KD_LOSSES)
def test_all_tokens_in_the_top_k_is_the_full_divergence(batch, kd_loss):
    logits = batch["hidden"] @ batch["weight"].T
    teacher_logits = batch["teacher_hidden"] @ batch["teacher_weight"].T
    teacher = TopK.of(teacher_logits.double(), VOCABULARY, 2.0)
    assert teacher.log_tail.max() < -20  # nothing is left
    torch.testing.assert_close(
        top_k_divergence(teacher, logits.double(), 2.0, kd_loss),
        full_divergence(teacher_logits.double(), logits.double(), 2.0, kd_loss),
    )


@pytest.mark.parametrize("is_cached", [False, True], ids=["online", "cached"])
@pytest.mark.parametrize("top_k", [16, None])
@pytest.mark.parametrize("kd_loss", KD_LOSSES)
def test_rows_that_pad_the_students_embedding_are_no_tokens(batch, kd_loss, top_k, is_cached):
    shared = VOCABULARY - 20
    head = Head(batch["hidden"].double(), batch["weight"].double(), batch["bias"].double())
    teacher = Head(batch["teacher_hidden"].double(), batch["teacher_weight"][:shared].double())
    logits, teacher_logits = head.logits(torch.float64)[:, :shared], teacher.logits(torch.float64)
    settings = Distillation(2.0, kd_loss, 0.3, top_k)
    if is_cached:
        teacher = TopK.of(teacher_logits, top_k or shared, 2.0)
        settings = Distillation(2.0, kd_loss, 0.3, vocab_size=shared)
    terms = distill(head, batch["targets"], teacher, settings, CPU)
    torch.testing.assert_close(terms.kd, naive_kd(teacher_logits, logits, 2.0, top_k, kd_loss, 0.3))


@pytest.mark.parametrize("kd_loss", KD_LOSSES)
@pytest.mark.parametrize("top_k", [1, 16, None])
def test_sure_teachers_and_students_stay_finite(kd_loss, top_k):
    certain = torch.full((4, 40), -300.0)
    certain[:, 0] = 300.0
    other = certain.flip(-1)
    for teacher_logits, student_logits in (
        (certain, certain),
        (certain, other),
        (other, certain),
        (certain, certain * 0),
    ):
        student = student_logits.clone().requires_grad_()
        if top_k is None:
            loss = full_divergence(teacher_logits, student, 1.0, kd_loss)
        else:
            loss = top_k_divergence(TopK.of(teacher_logits, top_k, 1.0), student, 1.0, kd_loss)
        assert torch.isfinite(loss).all() and (loss > -1e-5).all()
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert torch.isfinite(gradient).all()
    equal = top_k_divergence(TopK.of(certain, 4, 1.0), certain, 1.0, kd_loss)
    assert equal.abs().max() < 1e-5


def test_a_teacher_of_a_padded_vocabulary():
    """Ids that only one of the two has are left out of both distributions."""
    teacher_logits, logits = torch.randn(5, 20), torch.randn(5, 24)
    expected = full_divergence(teacher_logits, logits[:, :20], 1.5, "forward_kl")
    assert torch.equal(full_divergence(teacher_logits, logits, 1.5, "forward_kl"), expected)


def test_the_teacher_may_give_nothing_to_a_token():
    teacher = torch.tensor([[0.0, -torch.inf]])
    student = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    for kd_loss in ("forward_kl", "jsd"):
        loss = divergence(teacher, student, kd_loss)
        assert torch.isfinite(loss).all() and torch.isfinite(torch.autograd.grad(loss.sum(), student)[0]).all()


def test_bfloat16_products_and_frozen_weights(batch):
    """LoRA: the head is frozen, and only the hidden states have a gradient."""
    hidden = batch["hidden"].requires_grad_()
    head, teacher = Head(hidden, batch["weight"]), Head(batch["teacher_hidden"], batch["teacher_weight"])
    exact, rough = (
        torch.autograd.grad(distill(head, batch["targets"], teacher, Distillation(), CPU, dtype).kd.sum(), hidden)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() / exact.norm() < 0.05


def test_softcap_and_scale_are_those_of_the_model():
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    logits = Head(hidden, weight, softcap=5.0, scale=0.25).logits(torch.float32)
    torch.testing.assert_close(logits, 5 * torch.tanh(0.25 * hidden @ weight.T / 5))
