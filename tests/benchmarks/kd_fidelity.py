"""
How true the gradient of a teacher's top K tokens is to that of its whole vocabulary, for three ways to treat the rest.

    python tests/benchmarks/kd_fidelity.py --write-docs

The logits are those of a real run: SmolLM2-135M-Instruct as the teacher, and the same weights rounded group-wise to 3 bits
as the student, on Python functions that are held out. Gradients of the forward KL divergence with respect to the student's
logits, and to its last hidden states, are taken in float64. "Tail bucket" is this package's loss.
"""

import argparse
from collections.abc import Callable

import torch
from damage import DOCUMENT, add_arguments, load_pair, prepare
from tables import write_block
from torch import Tensor
from transformers import AutoTokenizer

from hf_tpu_ext.distillation.losses import TopK, full_divergence, top_k_divergence


#: Tokens whose gradients are taken at once: a few arrays of this many times the vocabulary in float64.
_CHUNK = 64


def tail_bucket(teacher_logits: Tensor, logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """
    This package's loss.

    Args:
        teacher_logits (`torch.Tensor` of shape `(tokens, vocabulary)`):
            Logits of the teacher.
        logits (`torch.Tensor` of shape `(tokens, vocabulary)`):
            Logits of the student.
        top_k (`int`):
            How many of the teacher's tokens are known.
        temperature (`float`):
            Temperature of both.

    Returns:
        `torch.Tensor` of shape `(tokens,)`: The divergences.
    """
    return top_k_divergence(TopK.of(teacher_logits, top_k, temperature), logits, temperature, "forward_kl")


def zero_tail(teacher_logits: Tensor, logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """
    The teacher's mass outside of its top K is taken for 0, and the rest is left as it is. Arguments and result are those of
    [`tail_bucket`].
    """
    teacher = TopK.of(teacher_logits, top_k, temperature)
    student = (logits / temperature).log_softmax(-1).gather(-1, teacher.ids)
    return (teacher.log_probs.exp() * (teacher.log_probs - student)).sum(-1)


def renormalised(teacher_logits: Tensor, logits: Tensor, top_k: int, temperature: float) -> Tensor:
    """
    Teacher and student as distributions over the top K alone. Arguments and result are those of [`tail_bucket`].
    """
    values, ids = teacher_logits.topk(top_k)
    return full_divergence(values, logits.gather(-1, ids), temperature, "forward_kl")


METHODS = {
    "tail bucket (this package)": tail_bucket,
    "zero tail": zero_tail,
    "renormalised over the top K": renormalised,
}


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    """
    Gradient of a loss with respect to logits.

    Args:
        loss (`Callable`):
            Takes logits, returns a loss for each token.
        logits (`torch.Tensor` of shape `(tokens, vocabulary)`):
            Logits of the student.

    Returns:
        `torch.Tensor` of shape `(tokens, vocabulary)`: The gradient.
    """
    logits = logits.detach().requires_grad_()
    return torch.autograd.grad(loss(logits).sum(), logits)[0]


class Comparison:
    """Cosine and ratio of norms between a gradient and the true one, gathered over parts of them."""

    def __init__(self):
        self._product = self._own = self._true = 0.0

    def add(self, own: Tensor, true: Tensor) -> None:
        """
        Add a part.

        Args:
            own (`torch.Tensor`):
                Part of the gradient.
            true (`torch.Tensor`):
                Same part of the true one.
        """
        self._product += (own * true).sum().item()
        self._own += own.square().sum().item()
        self._true += true.square().sum().item()

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two."""
        return self._product / (self._own * self._true) ** 0.5

    @property
    def norm_ratio(self) -> float:
        """Norm of the gradient over that of the true one."""
        return (self._own / self._true) ** 0.5


def measure(
    teacher_logits: Tensor, logits: Tensor, head: Tensor, top_k: int, temperature: float
) -> tuple[float, dict[str, dict[str, Comparison]]]:
    """
    Compare all methods with the whole vocabulary.

    Args:
        teacher_logits (`torch.Tensor` of shape `(tokens, vocabulary)`):
            Logits of the teacher.
        logits (`torch.Tensor` of shape `(tokens, vocabulary)`):
            Logits of the student.
        head (`torch.Tensor` of shape `(vocabulary, hidden_size)`):
            Weight of the student's head.
        top_k (`int`):
            How many of the teacher's tokens are known.
        temperature (`float`):
            Temperature of both.

    Returns:
        `tuple`: The teacher's mean mass in its top K, and by method the [`Comparison`] of gradients of the `logits` and of the
        `hidden` states.
    """
    results = {method: {"logits": Comparison(), "hidden": Comparison()} for method in METHODS}
    head, coverage = head.double(), 0.0
    for begin in range(0, logits.shape[0], _CHUNK):
        teacher, student = (part[begin : begin + _CHUNK].double() for part in (teacher_logits, logits))
        coverage += TopK.of(teacher, top_k, temperature).log_probs.exp().sum().item()
        true = gradient(lambda x, y=teacher: full_divergence(y, x, temperature, "forward_kl"), student)
        for method, result in results.items():
            own = gradient(lambda x, y=teacher, loss=METHODS[method]: loss(y, x, top_k, temperature), student)
            result["logits"].add(own, true)
            result["hidden"].add(own @ head, true @ head)
    return coverage / logits.shape[0], results


def make_table(results: dict[float, tuple[float, dict[str, dict[str, Comparison]]]]) -> str:
    """
    Show the results.

    Args:
        results (`dict[float, tuple]`):
            What [`measure`] returned, by temperature.

    Returns:
        `str`: Markdown table.
    """
    lines = [
        "| Temperature | mass in the top K | the other tokens | logits: cosine | norm ratio | hidden states: cosine | norm ratio |",
        "|---:|---:|---|" + "---:|" * 4,
    ]
    for temperature, (coverage, by_method) in results.items():
        for method, result in by_method.items():
            numbers = " | ".join(
                f"{comparison.cosine:.4f} | {comparison.norm_ratio:.3f}" for comparison in result.values()
            )
            lines.append(f"| {temperature:g} | {coverage:.1%} | {method} | {numbers} |")
    return "\n".join(lines)


@torch.no_grad()
def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--top_k", type=int, default=128, help="the teacher's tokens that are known (default: 128)")
    parser.add_argument("--tokens", type=int, default=384, help="positions to average over (default: 384)")
    parser.add_argument("--write-docs", action="store_true", help="replace the table in docs/distillation.md")
    arguments = parser.parse_args()
    texts = prepare(arguments)["test"]["text"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_dir)
    rows, count = [], 0
    for text in texts:
        rows.append(torch.tensor([tokenizer(text)["input_ids"]]))
        count += rows[-1].shape[1]
        if count >= arguments.tokens:
            break
    logits = []
    for model in load_pair(arguments):
        logits.append(torch.cat([model(row).logits[0] for row in rows])[: arguments.tokens])
    head = model.get_output_embeddings().weight
    results = {}
    with torch.enable_grad():
        for temperature in (1.0, 2.0, 4.0):
            print(f"temperature {temperature:g}", flush=True)
            results[temperature] = measure(*logits, head.detach(), arguments.top_k, temperature)
    block = (
        f"{make_table(results)}\n\n- gradients: of the forward KL divergence, K={arguments.top_k}, against those of the whole "
        f"vocabulary of {head.shape[0]} tokens, in float64, over {logits[0].shape[0]} positions of held-out Python functions\n"
        f"- teacher: SmolLM2-135M-Instruct; student: its linear layers rounded to {arguments.bits} bits in groups of "
        f"{arguments.group_size}\n- command: `python tests/benchmarks/kd_fidelity.py`"
    )
    print(block)
    if arguments.write_docs:
        write_block(DOCUMENT, "kd_fidelity", block)


if __name__ == "__main__":
    main()
