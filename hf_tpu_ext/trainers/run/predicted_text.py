"""Predictions that are text: what a model goes on with after the prompt of each row, in place of its logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...errors import UserError
from ..configs import PredictedTextArguments
from .text import TextGeneration


logger = logging.get_logger(__name__)

# What upstream pads predictions with, and marks tokens without a label with.
_NOTHING = -100


def check_predicted_text(args: PredictedTextArguments, model: nn.Module, has_metrics: bool) -> None:
    """Refuse (`ValueError`) an encoder-decoder model, whose predictions are text by upstream, and say where text has no effect."""
    model = unwrap_peft_model(model)
    if isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder:
        raise UserError(
            f"predict_with_generate=True of {type(args).__name__} writes on after a prompt, and {type(model).__name__} is an "
            "encoder-decoder model. Train it with hf_tpu_ext.TPUSeq2SeqTrainer and "
            "Seq2SeqTrainingArguments(predict_with_generate=True)."
        )
    if not has_metrics:
        logger.warning(
            "predict_with_generate=True has no effect on evaluate() without compute_metrics, only on predict()."
        )


def write_predictions(text: TextGeneration, inputs: Mapping[str, Any], args: PredictedTextArguments) -> Tensor:
    """
    Write what follows the prompts of a batch, whose `input_ids` and `labels` are of shape `(rows, length)`.

    Returns:
        `torch.Tensor` of shape `(rows, generation_max_new_tokens)`, int64: The tokens, and -100 after the end of a text.

    Raises:
        `ValueError`: A row has no prompt.
    """
    prompts = [_prompt_of(row, inputs) for row in range(len(inputs["input_ids"]))]
    # The last batch of an evaluation is the same program.
    token_ids = text.generate(prompts, rows=args.eval_batch_size).token_ids
    longest = torch.zeros(args.generation_max_new_tokens, dtype=torch.int64)
    rows = [torch.tensor(tokens, dtype=torch.int64) for tokens in token_ids]
    return pad_sequence([*rows, longest], batch_first=True, padding_value=_NOTHING)[:-1]


def _prompt_of(row: int, inputs: Mapping[str, Any]) -> list[int]:
    tokens, labels = inputs["input_ids"][row], inputs["labels"][row]
    if "attention_mask" in inputs:
        is_token = inputs["attention_mask"][row].bool()
        tokens, labels = tokens[is_token], labels[is_token]
    has_label = (labels != _NOTHING).tolist()
    prompt = tokens[: has_label.index(True)] if any(has_label) else tokens
    if not len(prompt):
        raise UserError(
            f"predict_with_generate=True: row {row} of a batch has a label at its first token, so there is no prompt to write on "
            "after. Give labels of -100 to prompts; of SFT, completion_only_loss=True or assistant_only_loss=True does so."
        )
    return prompt.tolist()
