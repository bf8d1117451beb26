"""The general trainer."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_utils import unwrap_peft_model

from .configs import TPUTrainingArguments
from .mixin import TPUTrainerMixin
from .saving import UPSTREAM_METRICS


class TPUTrainer(TPUTrainerMixin, Trainer):
    """
    [`~transformers.Trainer`] that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~transformers.Trainer`] takes, a plain [`~transformers.TrainingArguments`] included. Arguments
    are not changed.

    Raises:
        `ValueError`: A setting or a dataset does not work; the message says what to do instead.
    """

    evaluation_metrics = (UPSTREAM_METRICS, ())

    _config_name = TPUTrainingArguments.__name__

    def _make_batches_static(self) -> None:
        if "attention_mask" in inspect.signature(unwrap_peft_model(self.model).forward).parameters:
            self.data_collator = partial(collate_with_mask, self.data_collator)
        super()._make_batches_static()


def collate_with_mask(collator: Callable[[list], Mapping[str, Any]], examples: list) -> dict[str, Any]:
    """
    Collates examples and adds the int64 attention mask `(batch, length)` that a collator leaves out: all ones, since it
    masks nothing by then.

    Without a mask, transformers looks on the host at every step whether the positions restart within a row, and a
    bidirectional model would attend to the padding that is added next. Batches that bring positions of their own are left
    alone, and so are those without `input_ids`.
    """
    batch = dict(collator(examples))
    if "input_ids" in batch and "position_ids" not in batch:
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    return batch
