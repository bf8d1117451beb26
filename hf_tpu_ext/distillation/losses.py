"""Divergences between a teacher's and a student's next-token distributions, token by token."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import Backend


KD_LOSSES = ("forward_kl", "reverse_kl", "jsd")


class TopK(NamedTuple):
    """
    A teacher's most likely tokens.

    Args:
        ids (`torch.Tensor` of shape `(tokens, top_k)`): Their token ids.
        log_probs (`torch.Tensor` of shape `(tokens, top_k)`):
            Their exact log-probabilities at the temperature of the distillation.
        log_tail (`torch.Tensor` of shape `(tokens,)`):
            Logarithm of what is missing to 1, the mass of all other tokens. It is given, since as a difference to 1 it
            would be rounding alone where the teacher is sure of itself.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor

    def full_to_shard(self, backend: Backend) -> "TopK":
        """What one chip holds of it, in the part of a program that each chip runs by itself."""
        return TopK(*(backend.manual_sharding.full_to_shard(value, by_rows=True) for value in self))

    @classmethod
    def of(cls, logits: Tensor, top_k: int, temperature: float) -> "TopK":
        """The `top_k` most likely tokens of logits `(tokens, vocabulary)` at a temperature, most likely first."""
        all_log_probs = (logits / temperature).log_softmax(-1)
        log_probs, ids = all_log_probs.topk(top_k)
        return cls(ids, log_probs, all_log_probs.scatter(-1, ids, -math.inf).logsumexp(-1))


def divergence(teacher: Tensor, student: Tensor, kd_loss: str, beta: float = 0.5) -> Tensor:
    """
    Divergence between two distributions over the same classes, for each token: at least 0 up to rounding.

    Forward KL is `KL(p || q)` for a teacher `p` and a student `q`, whose gradient is that of the soft cross-entropy
    (https://huggingface.co/papers/1503.02531); reverse KL is `KL(q || p)`; the generalized Jensen-Shannon divergence
    is `beta * KL(p || m) + (1 - beta) * KL(q || m)` with `m = beta * p + (1 - beta) * q`
    (https://huggingface.co/papers/2306.13649).

    Args:
        teacher (`torch.Tensor` of shape `(tokens, classes)`): Log-probabilities of the teacher; `-inf` is allowed.
        student (`torch.Tensor` of shape `(tokens, classes)`): Finite log-probabilities of the student.
        kd_loss (`str`): One of `KD_LOSSES`.
        beta (`float`, *optional*, defaults to `0.5`): Weight of the teacher in the mixture, above 0 and below 1.
    """
    p = teacher.exp()
    # 0 * log 0 is 0. Where the teacher gives nothing, any finite number serves as its logarithm.
    log_p = torch.where(p > 0, teacher, torch.zeros_like(teacher))
    if kd_loss == "forward_kl":
        return (p * (log_p - student)).sum(-1)
    q = student.exp()
    if kd_loss == "reverse_kl":
        return _expectation(q, student - teacher)
    assert kd_loss == "jsd", f"no definition of {kd_loss!r}"
    # `torch.logaddexp` has no lowering for XLA.
    mixture = torch.stack([teacher + math.log(beta), student + math.log1p(-beta)]).logsumexp(0)
    of_teacher = (p * (log_p - mixture)).sum(-1).detach()
    return beta * of_teacher + (1 - beta) * _expectation(q, student - mixture)


def _expectation(q: Tensor, ratio: Tensor) -> Tensor:
    """
    `sum(q * ratio)`, with the gradient of a divergence of `q`: what reaches `q` through `ratio` sums to 0.

    For reverse KL and Jensen-Shannon the derivatives of the logarithms cancel, since probabilities sum to 1, and so does
    the part of `ratio` that is the same for all classes. Left to autograd, float32 would keep their rounding.
    """
    ratio = ratio.detach()
    value = (q.detach() * ratio).sum(-1, keepdim=True)
    return value[..., 0] + (q * (ratio - value)).sum(-1)


def top_k_divergence(teacher: TopK, logits: Tensor, temperature: float, kd_loss: str, beta: float = 0.5) -> Tensor:
    """
    [`divergence`] over the teacher's top K tokens and one bucket for all others, from the student's logits.

    Both distributions keep their exact probabilities in the top K, and the rest of their mass in the bucket. To renormalise over the top K
    instead would throw the tail away and bias the gradient.
    """
    student_logits = logits / temperature
    normaliser = student_logits.logsumexp(-1, keepdim=True)
    ids = teacher.ids.long()
    student = student_logits.gather(-1, ids) - normaliser
    log_probs = teacher.log_probs.to(student.dtype)
    if ids.shape[-1] < logits.shape[-1]:
        # The sum of what is in it, not a difference to 1, for the same reason as the teacher's.
        others = student_logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
        student = torch.cat([student, others - normaliser], dim=-1)
        log_probs = torch.cat([log_probs, teacher.log_tail[..., None].to(student.dtype)], dim=-1)
    return divergence(log_probs, student, kd_loss, beta)


def full_divergence(
    teacher_logits: Tensor, logits: Tensor, temperature: float, kd_loss: str, beta: float = 0.5
) -> Tensor:
    """
    [`divergence`] over the whole vocabulary, from logits of shape `(tokens, vocabulary)`.

    Where the vocabularies differ in size (padding of the embedding), both distributions are over the shared ids.
    """
    shared = min(teacher_logits.shape[-1], logits.shape[-1])
    teacher = (teacher_logits[..., :shared] / temperature).log_softmax(-1)
    student = (logits[..., :shared] / temperature).log_softmax(-1)
    return divergence(teacher, student, kd_loss, beta)
