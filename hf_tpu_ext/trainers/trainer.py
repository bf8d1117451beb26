"""The general trainer, and the one of encoder-decoder models."""

import inspect

from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import unwrap_peft_model

from .checkpoint.saving import UPSTREAM_METRICS
from .configs import TPUSeq2SeqTrainingArguments, TPUTrainingArguments
from .mixin import TPUTrainerMixin


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

    @property
    def _adds_mask(self) -> bool:
        return "attention_mask" in inspect.signature(unwrap_peft_model(self.model).forward).parameters


class TPUSeq2SeqTrainer(TPUTrainer, Seq2SeqTrainer):
    """
    [`~transformers.Seq2SeqTrainer`] that trains T5, BART and other encoder-decoder models on TPU, GPU and CPU with the same
    arguments: a plain [`~transformers.Seq2SeqTrainingArguments`], `predict_with_generate` included.
    """

    evaluation_metrics = TPUTrainer.evaluation_metrics

    _config_name = TPUSeq2SeqTrainingArguments.__name__
