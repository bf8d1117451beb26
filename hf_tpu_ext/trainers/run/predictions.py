"""What an evaluation predicts: the columns that upstream's collator gives a batch, or text in place of logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationMixin
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...data.static_shapes import as_collated
from ...errors import UserError
from ..configs import PredictedTextArguments
from .text import TextGeneration


logger = logging.get_logger(__name__)

# What upstream pads predictions with, and marks tokens without a label with.
_NOTHING = -100


def find_columns(inputs: Mapping[str, Any], device_batch: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many columns the keys of a batch had when it was collated, and how many they had on the device."""
    return {
        key: (value.shape[1], device_batch[key].shape[1])
        for key, value in as_collated(inputs).items()
        if isinstance(value, torch.Tensor) and value.ndim > 1 and key in device_batch
    }


def without_added(
    predictions: Any,
    labels: Any,
    columns: Mapping[str, tuple[int, int]],
    label_names: Sequence[str],
    pad_beside_text: Callable[[Tensor], Tensor] | None,
    are_spans: bool = False,
) -> tuple[Any, Any]:
    """
    Predictions and labels of a batch, as upstream's `prediction_step` returns them, without the columns that were added, see
    [`find_columns`]. Values with a column less than the batch, such as those that are shifted, lose as many. Where predictions are text,
    they have columns of their own, and the labels are padded by `pad_beside_text`. Predictions that `are_spans` are logits of the
    columns of a row, of shape `(rows, length)`.
    """
    if all(before == after for before, after in columns.values()):
        return predictions, labels
    of_labels = columns.get(label_names[0]) if label_names else None
    if pad_beside_text is not None:
        return predictions, labels if of_labels is None else pad_beside_text(labels[:, : of_labels[0]])
    if isinstance(labels, tuple):
        labels = tuple(_cut(value, columns.get(name)) for name, value in zip(label_names, labels, strict=True))
    else:
        # DPO and KTO, whose batches have no labels, give `input_ids` as such.
        labels = _cut(labels, of_labels or columns.get("input_ids"))
    if are_spans:
        return _cut_states(predictions, columns, least_dims=2), labels
    if isinstance(predictions, (list, tuple)):
        first = (_cut_logits(value, of_labels, columns) for value in predictions[:1])
        others = (_cut_states(value, columns) for value in predictions[1:])
        return type(predictions)([*first, *others]), labels
    return _cut_logits(predictions, of_labels, columns), labels


def _cut_logits(value: Any, of_labels: tuple[int, int] | None, columns: Mapping[str, tuple[int, int]]) -> Any:
    """Logits have the columns of the labels, if those have any: a decoder may have its own."""
    return _cut(value, of_labels) if _has_columns(value, of_labels) else _cut_states(value, columns)


def _cut_states(value: Any, columns: Mapping[str, tuple[int, int]], least_dims: int = 3) -> Any:
    """A value for each token of the input, such as hidden states, or several of them. Classes of a row may be as many."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cut_states(part, columns, least_dims) for part in value)
    is_of_tokens = isinstance(value, torch.Tensor) and value.ndim >= least_dims
    return _cut(value, columns.get("input_ids")) if is_of_tokens else value


def _cut(value: Any, columns: tuple[int, int] | None) -> Any:
    if not _has_columns(value, columns):
        return value
    before, after = columns
    return value[:, : value.shape[1] - (after - before)]


def _has_columns(value: Any, columns: tuple[int, int] | None) -> bool:
    """Whether a value has a column for each of a key on the device, or one less."""
    if columns is None or not isinstance(value, torch.Tensor) or value.ndim < 2:
        return False
    return columns[1] - 1 <= value.shape[1] <= columns[1]


def check_predicted_text(args: PredictedTextArguments, model: nn.Module, has_metrics: bool) -> None:
    """
    Refuse (`ValueError`) a model that has no text, and an encoder-decoder model, whose predictions are text by upstream; say where
    text has no effect.
    """
    model = unwrap_peft_model(model)
    if not isinstance(model, GenerationMixin):
        raise UserError(
            f"predict_with_generate=True of {type(args).__name__} writes on after a prompt, and {type(model).__name__} has no "
            "`generate`. Leave predict_with_generate out, for its logits."
        )
    if model.config.is_encoder_decoder:
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
