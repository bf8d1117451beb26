"""The general trainer."""

from transformers import Trainer, TrainingArguments

from ..data import StaticShapeCollator, round_up_length
from .configs import ExtensionArguments, TPUTrainingArguments
from .lengths import declare_lengths, row_lengths
from .mixin import TPUTrainerMixin


class TPUTrainer(TPUTrainerMixin, Trainer):
    """
    [`~transformers.Trainer`] that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~transformers.Trainer`] takes, a plain [`~transformers.TrainingArguments`] included.

    Args:
        model ([`~transformers.PreTrainedModel`], *optional*):
            As [`~transformers.Trainer`].
        args ([`TPUTrainingArguments`] or [`~transformers.TrainingArguments`], *optional*):
            Arguments. They are not changed.
        *rest:
            As [`~transformers.Trainer`].
        **kwargs:
            As [`~transformers.Trainer`].

    Raises:
        `ValueError`: A setting does not work; the message says what to do instead.
    """

    def _default_args(self, model) -> TrainingArguments:
        return TrainingArguments(output_dir="tmp_trainer")

    @property
    def _pad_token_id(self) -> int:
        if self.processing_class is None:
            return 0
        if self.processing_class.pad_token_id is None:
            raise ValueError(
                "The tokenizer has no pad token, and batches are padded to a fixed length on XLA. Set one, for example "
                "tokenizer.pad_token = tokenizer.eos_token, and pass it as processing_class=tokenizer."
            )
        return self.processing_class.pad_token_id

    def _declare_lengths(self) -> list[int]:
        lengths = row_lengths(self.train_dataset)
        max_length = self.args.max_length if isinstance(self.args, TPUTrainingArguments) else None
        if max_length is None and lengths is not None:
            longest = max(lengths)
            max_length = round_up_length(longest, longest + 128)
        if max_length is None:
            # Whatever the collator yields; the first other shape is an error.
            return []
        buckets = self.args.length_buckets if isinstance(self.args, ExtensionArguments) else None
        return declare_lengths(buckets, max_length, lengths, self._train_batch_size, self.args.train_sampling_strategy)

    def _make_batches_static(self) -> None:
        if self.lengths:
            self.data_collator = StaticShapeCollator(self.data_collator, self.lengths, self._pad_token_id)
