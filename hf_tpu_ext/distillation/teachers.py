"""Teachers behind one interface: what the student learns from, for each token of a batch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import add_fused_lm_head

from ..errors import UserError
from ..layers.batch_length import BatchLength
from ..layers.chunked_head import head_computed_by
from .fused_head import Head
from .losses import TopK


#: What a student learns from. Called with the student and a batch, whose own inputs it takes out, it answers for the
#: `batch * (length - 1)` positions that predict a label.
Teacher = Callable[[nn.Module, dict[str, Any]], Head | TopK]


@torch.no_grad()
def run_to_head(model: nn.Module, inputs: dict[str, Any]) -> Head:
    """
    Run a model with [`~trl.trainer.utils.add_fused_lm_head`] up to its head, on a batch with `labels`.

    Returns:
        [`Head`]: What its logits are computed from, for the `batch * (length - 1)` positions that predict a label.
    """
    heads = []

    def capture(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        heads.append(Head(hidden, weight, bias, softcap, scale))
        return (torch.zeros_like(targets, dtype=torch.float32), None, None, None, None)

    with head_computed_by(capture):
        model(**inputs, fused_lm_head=True)
    (head,) = heads
    return head


def check_vocabulary(teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher whose token ids mean other tokens. One of the two may have more, behind those of both."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    shared = min(max(theirs.values()), max(ours.values()))
    other = [token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)]
    other = [token for token in other if min(theirs.get(token, math.inf), ours.get(token, math.inf)) <= shared]
    if other:
        raise UserError(
            f"kd_teacher={name!r} has another vocabulary than the student: {len(other)} tokens have other ids, for example "
            f"{min(other)!r}. Choose a teacher with the student's tokenizer."
        )


def check_answers_alone(model: nn.Module, longest: int, name: str) -> None:
    """
    Refuse (`ValueError`) a teacher whose answer for a row, of up to `longest` tokens, depends on the longest row of the batch
    that the row is in: a cache is made before it is known.
    """
    lengths = BatchLength([model], longest)
    if lengths.rope_scaling is not None:
        rope_type, longest_unscaled = lengths.rope_scaling
        raise UserError(
            f"kd_teacher={name!r} has rotary embeddings whose frequencies depend on the longest row of a batch (rope_type="
            f"{rope_type!r}) beyond {longest_unscaled} tokens, and a row of the data has {longest}: what a cache holds would not be what "
            f"the teacher says in training. Set max_length={longest_unscaled}, or train without kd_cache."
        )
    if lengths.is_block_sparse:
        raise UserError(
            f"kd_teacher={name!r} has block-sparse attention, which depends on the longest row of a batch: what a cache holds "
            'would not be what the teacher says in training. Set "attention_type": "original_full" in the teacher\'s '
            "config.json, or train without kd_cache."
        )


class OnlineTeacher:
    """A frozen model that runs beside the student, in the same program."""

    def __init__(self, model: nn.Module):
        self.model = model.eval().requires_grad_(False)
        add_fused_lm_head(model)

    def __call__(self, student: nn.Module, inputs: dict[str, Any]) -> Head:
        return run_to_head(self.model, inputs)


def anchor_teacher(student: PeftModel, inputs: dict[str, Any]) -> Head:
    """The student's own base, with the adapters switched off: no second model in memory."""
    training = student.training
    student.eval()
    with student.disable_adapter():
        head = run_to_head(student, inputs)
    student.train(training)
    return head
