"""The student's language model head, fused with cross-entropy and distillation: no logits of a whole batch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.base import Backend
from .losses import TopK, full_divergence, top_k_divergence


# Elements of a chunk's logits. A chunk of fewer tokens for a larger vocabulary keeps the memory the same.
_CHUNK_ELEMENTS = 2**23
_MOST_TOKENS = 1024
# Each chunk reads the weights of the heads. With fewer tokens, a TPU would wait for them: it multiplies about 240 times in the time
# that a weight takes.
_LEAST_TOKENS = 256


class Head(NamedTuple):
    """
    What a language model computes its logits from.

    Args:
        hidden (`torch.Tensor` of shape `(tokens, hidden_size)`): Last hidden states.
        weight (`torch.Tensor` of shape `(vocabulary, hidden_size)`): Weight of the head.
        bias (`torch.Tensor` of shape `(vocabulary,)`, *optional*): Its bias.
        softcap (`float`, *optional*): `final_logit_softcapping` of the model.
        scale (`float`): What the logits are multiplied by.
        temperature (`float`): What they are divided by, after the soft cap.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0

    def full_to_shard(self, backend: Backend) -> "Head":
        """What one chip holds of it, in the part of a program that each chip runs by itself; no autograd history."""
        return self._replace(
            hidden=backend.manual_sharding.full_to_shard(self.hidden, by_rows=True),
            weight=backend.manual_sharding.full_to_shard(self.weight),
            bias=None if self.bias is None else backend.manual_sharding.full_to_shard(self.bias),
        )

    def logits(self, dtype: torch.dtype) -> Tensor:
        """Logits `(tokens, vocabulary)` from a product in `dtype`: float32, or float64 for such weights."""
        logits = self.hidden.to(dtype) @ self.weight.to(dtype).T
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.bias is not None:
            logits = logits + self.bias
        logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits if self.temperature == 1 else logits / self.temperature


class TokenTerms(NamedTuple):
    """
    What distillation knows about each token, all of shape `(tokens,)`. The first two have gradients.

    Args:
        log_probs (`torch.Tensor`): Log-probability of the target, at temperature 1.
        kd (`torch.Tensor`): Divergence from the teacher, without the factor `temperature**2`.
        entropy (`torch.Tensor`): Entropy of the student, at temperature 1.
        is_top1 (`torch.Tensor`): 1 where the target is the student's most likely token.
        coverage (`torch.Tensor`): The teacher's mass in its top K; 1 for the whole vocabulary.
        agreement (`torch.Tensor`): 1 where the student's most likely token is the teacher's.
    """

    log_probs: Tensor
    kd: Tensor
    entropy: Tensor
    is_top1: Tensor
    coverage: Tensor
    agreement: Tensor


@dataclass(frozen=True)
class Distillation:
    """
    How a student learns from a teacher.

    Args:
        temperature (`float`): Temperature of both distributions.
        kd_loss (`str`): `"forward_kl"`, `"reverse_kl"` or `"jsd"`.
        beta (`float`): Weight of the teacher in the mixture of `"jsd"`.
        top_k (`int`, *optional*):
            Tokens of a teacher's logits to learn from, with one bucket for the others; all by default.
        vocab_size (`int`, *optional*):
            Tokens that a teacher's top K are the most likely of, where it gives no logits; those of the student by default.
    """

    temperature: float = 1.0
    kd_loss: str = "forward_kl"
    beta: float = 0.5
    top_k: int | None = None
    vocab_size: int | None = None

    def terms(self, student: Head, targets: Tensor, teacher: Head | TopK, dtype: torch.dtype) -> TokenTerms:
        """Compare a student with its teacher on a few next tokens `targets`, with all of their logits in `dtype`."""
        logits = student.logits(dtype)
        log_probs = logits.log_softmax(-1)
        # Rows that pad an embedding are no tokens: both distributions are over the shared ids.
        shared = min(logits.shape[-1], self.vocab_size or logits.shape[-1])
        if isinstance(teacher, Head):
            with torch.no_grad():
                teacher_logits = teacher.logits(dtype)
                shared = min(teacher_logits.shape[-1], shared)
                teacher_tokens = teacher_logits[..., :shared].argmax(-1)
                if self.top_k is not None and self.top_k < shared:
                    teacher = TopK.of(teacher_logits[..., :shared], self.top_k, self.temperature)
        else:
            teacher_tokens = teacher.ids[..., 0]
        if isinstance(teacher, Head):
            kd = full_divergence(teacher_logits, logits, self.temperature, self.kd_loss, self.beta)
            coverage = torch.ones_like(kd)
        else:
            kd = top_k_divergence(teacher, logits[..., :shared], self.temperature, self.kd_loss, self.beta)
            coverage = teacher.log_probs.to(kd.dtype).exp().sum(-1).clamp(max=1)
        student_tokens = logits.argmax(-1)
        return TokenTerms(
            log_probs.gather(-1, targets[..., None])[..., 0],
            kd,
            -(log_probs.exp() * log_probs).sum(-1),
            (student_tokens == targets).to(kd.dtype),
            coverage,
            (student_tokens == teacher_tokens).to(kd.dtype),
        )


class FusedDistillation(torch.autograd.Function):
    """
    [`Distillation.terms`] for a whole batch, a chunk of tokens at a time, with gradients for the student's head.

    The backward pass computes the logits of each chunk anew, so at no time there are more than one chunk's. On XLA the
    chunks are the turns of one loop, and the size of the program does not depend on their number.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, teacher, student, settings, backend, dtype):
        ctx.set_materialize_grads(False)
        ctx.student, ctx.teacher, ctx.targets = student, teacher, targets
        ctx.settings, ctx.backend, ctx.dtype, ctx.is_manual = settings, backend, dtype, backend.manual_sharding.active
        ctx.save_for_backward(hidden, weight, bias)
        chunks = _Chunks(hidden, weight, targets, teacher)

        def compare(constants, chunk):
            terms = settings.terms(*chunks.take(chunk, student, *constants), dtype)
            return constants, tuple(terms)

        # The loop carries what all chunks share: each iteration would compute it anew.
        _, terms = backend.loops.scan(compare, _shared(weight, bias, teacher), chunks.tensors)
        terms = TokenTerms(*(chunks.join(term) for term in terms))
        ctx.mark_non_differentiable(*terms[2:])
        return tuple(terms)

    @staticmethod
    def backward(ctx, log_probs_grad, kd_grad, *_):
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        tokens = hidden.shape[0]
        sums = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        upstream = [
            torch.zeros(tokens, dtype=sums, device=hidden.device) if gradient is None else gradient.to(sums)
            for gradient in (log_probs_grad, kd_grad)
        ]
        chunks = _Chunks(hidden, weight, ctx.targets, ctx.teacher, *upstream)
        parameters = {"weight": weight} if needs_weight else {}
        if needs_bias:
            parameters["bias"] = bias

        def differentiate(loop_carry, chunk):
            constants, carry = loop_carry
            # Autograd runs on this thread: its own holds on to its last tensors for a moment longer, and on XLA those of a loop's
            # body have no data. A step that ends just then would crash.
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                head, targets, teacher = chunks.take(chunk, ctx.student, *constants)
                leaves = {name: head._asdict()[name].detach().requires_grad_() for name in parameters}
                head = head._replace(**leaves)
                rows = head.hidden.detach().requires_grad_(needs_hidden)
                terms = ctx.settings.terms(head._replace(hidden=rows), targets, teacher, ctx.dtype)
                by_log_prob, by_kd = chunk[-2:]
                total = (terms.log_probs * by_log_prob + terms.kd * by_kd).sum()
                inputs = [*([rows] if needs_hidden else []), *leaves.values()]
                gradients = list(torch.autograd.grad(total, inputs))
            hidden_grad = gradients.pop(0) if needs_hidden else by_kd
            carry = tuple(so_far + new for so_far, new in zip(carry, gradients, strict=True))
            return (constants, carry), (hidden_grad,)

        start = tuple(torch.zeros(tensor.shape, dtype=sums, device=hidden.device) for tensor in parameters.values())
        with ctx.backend.manual_sharding.region(ctx.is_manual):
            (_, totals), (rows_grad,) = ctx.backend.loops.scan(
                differentiate, (_shared(weight, bias, ctx.teacher), start), chunks.tensors
            )
        by_name = {name: total.to(parameters[name].dtype) for name, total in zip(parameters, totals, strict=True)}
        hidden_grad = chunks.join(rows_grad).to(hidden.dtype) if needs_hidden else None
        return hidden_grad, by_name.get("weight"), by_name.get("bias"), *[None] * 6


def _shared(weight: Tensor, bias: Tensor | None, teacher: Head | TopK) -> tuple[tuple, tuple]:
    """Weights and biases, of the student and of a teacher that is run."""
    return (weight, bias), () if isinstance(teacher, TopK) else (teacher.weight, teacher.bias)


def split_tokens(tensor: Tensor, most: int) -> Tensor:
    """Split `(tokens, ...)` into chunks of one size, at most `most`: `(chunks, tokens, ...)`, completed with zeros."""
    tokens = tensor.shape[0]
    count = -(-tokens // most)
    # Even chunks rather than a short last one.
    size = -(-tokens // count)
    if missing := count * size - tokens:
        tensor = torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])
    return tensor.reshape(count, size, *tensor.shape[1:])


class _Chunks:
    """What a batch has of each token, in chunks by [`split_tokens`]."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Head | TopK, *more: Tensor):
        self._tokens = hidden.shape[0]
        most = min(_MOST_TOKENS, max(_LEAST_TOKENS, _CHUNK_ELEMENTS // weight.shape[0] // 8 * 8))
        self._teacher = teacher
        by_token = (teacher.hidden,) if isinstance(teacher, Head) else tuple(teacher)
        self.tensors = tuple(split_tokens(tensor, most) for tensor in (hidden, targets, *by_token, *more))

    def take(
        self, chunk: tuple[Tensor, ...], student: Head, own: tuple[Tensor, ...], of_teacher: tuple[Tensor, ...]
    ) -> tuple[Head, Tensor, Head | TopK]:
        hidden, targets, *rest = chunk
        student = student._replace(hidden=hidden, weight=own[0], bias=own[1])
        if isinstance(self._teacher, TopK):
            return student, targets, TopK(*rest[:3])
        return student, targets, self._teacher._replace(hidden=rest[0], weight=of_teacher[0], bias=of_teacher[1])

    def join(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, *tensor.shape[2:])[: self._tokens]


def distill(
    student: Head,
    targets: Tensor,
    teacher: Head | TopK,
    settings: Distillation,
    backend: Backend,
    dtype: torch.dtype | None = None,
) -> TokenTerms:
    """
    Compare a student with its teacher on every token of a batch, whose next tokens `targets`, of shape `(tokens,)`,
    are within the vocabulary. Gradients reach the student's hidden states, weight and bias, through `log_probs` and
    `kd`. `dtype` is that of the matrix products; that of the hidden states by default.
    """
    return TokenTerms(
        *FusedDistillation.apply(
            student.hidden,
            student.weight,
            student.bias,
            targets,
            teacher,
            student,
            settings,
            backend,
            student.hidden.dtype if dtype is None else dtype,
        )
    )
