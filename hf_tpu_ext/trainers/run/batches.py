"""Batches, on their way to the device."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin, Seq2SeqTrainer, Trainer
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...data.static_shapes import (
    CollatedBatch,
    ShapeGuard,
    StaticShapeCollator,
    count_all,
    count_not_padding,
    count_rows,
    length_of,
    pad_columns,
    pad_rows,
    pad_value_of,
)
from ...errors import UserError
from ...layers.batch_length import BatchLength
from ...step.running_code import is_known
from ..checks.datasets import named_datasets
from ..checks.families import (
    class_that_sees_padding,
    predicts_spans,
    why_model_counts_tokens,
    why_targets_count,
)
from ..checks.upstream import upstream_of
from ..configs import PaddedArguments
from .images import ImagesMixin
from .index_ranges import IndexRanges
from .lengths import length_for, row_lengths
from .programs import SentBatch
from .user_code import METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP, find_own_code, owner_of


logger = logging.get_logger(__name__)


# Trainers whose loss takes `labels` as the model's does.
_LOSSES_BY_LABELS = ("transformers.trainer", "trl.trainer.sft_trainer")
_TRUNCATION = "tokenizer(..., truncation=True, max_length={})"


def _why_not_scaled(rope_type: str, num_unscaled: int, why: str) -> str:
    # A configuration with `longrope` has no other type.
    other = ", or load the model with another rope_type, for example 'yarn'" if "dynamic" in rope_type else ""
    return (
        f"The frequencies of the model's rotary embeddings depend on the longest row of a batch (rope_type={rope_type!r}), which is "
        f"not known where {why}. Keep to {num_unscaled} tokens, up to which they are always the same "
        f"(max_length={num_unscaled}; with generated text, max_completion_length and the prompts together){other}."
    )


class PreparedBatch(dict):
    """A batch as the code of a step gets it. Its values are attributes, too, as those of `BatchEncoding`, upstream's batches."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"The batch has no {name!r}, only {', '.join(map(repr, self))}.") from None


class BatchesMixin(ImagesMixin):
    """
    The part of [`TPUTrainerMixin`] that gives batches a declared shape and sends them.

    Rows that are masked out are added to the last batch where that is known to change nothing: the loss is upstream's
    own, over the labels that are not -100, and no code looks at the rows of a batch together. Otherwise the last batch
    keeps its own shape, which is one more program, and a line says so.
    """

    def _arrange_batches(self) -> None:
        self._shape_guards: dict[str, ShapeGuard] = {}
        self._last_batch_guards: dict[str, ShapeGuard] = {}
        # Found by the first batch of a pass over data, which is full if any is, where the collator does not tell.
        self._rows_of_example: dict[str, int] = {}
        # What a line was said about already.
        self._said: set[str] = set()
        # The documents of a packed batch on the device, from when it is prepared until it is forgotten.
        self.segment_ids: torch.Tensor | None = None

    @property
    def _pad_token_id(self) -> int:
        """What `input_ids` are padded with."""
        tokenizer = self.processing_class
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer.tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            # None, or a processor of images or sounds. By this number models tell padding from tokens, where they do.
            config = vars(unwrap_peft_model(self.model)).get("config")
            pad_token = vars(config).get("pad_token_id") if isinstance(config, PreTrainedConfig) else None
            return 0 if pad_token is None else pad_token
        # As in TRL's trainers.
        return next((id for id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id is not None), 0)

    def lengths_of_rows(self, dataset) -> list[int] | None:
        """Lengths of a dataset's rows, by which batches are padded; `None` where they are not known without going through it."""
        return row_lengths(dataset)

    def rows_of_a_step(self) -> tuple[int, int]:
        """Rows of the data that are trained on together, and how many optimizer steps these make."""
        return self._train_batch_size * self.args.gradient_accumulation_steps, 1

    def expect_batches(self, mode: str) -> None:
        """Begin a pass over data for `"train"` or `"eval"`, whose last batch may have fewer rows."""
        limit = max(1, len(self.lengths)) * (2 if self.some_without_images else 1)
        # The ranges of the model as it is at the first batch.
        self._ranges: list[IndexRanges] = []
        self._ranges_of_labels: IndexRanges | None = None
        self._rows_of_example.pop(mode, None)
        # Whether code of the user's may look at texts in this pass; asked where a batch has some.
        self._reads_texts: bool | None = None
        self._shape_guards[mode] = ShapeGuard(limit, self.lengths, self._config_name)
        self._last_batch_guards[mode] = ShapeGuard(limit, self.lengths, self._config_name)

    def begin_batches(self) -> None:
        """Begin the batches of a run: not when `train` is called, since auto_find_batch_size begins again with other shapes."""
        self.expect_batches("train")
        self.programs.of_run.clear()
        if self.neftune_noise_alpha is not None:
            self.by_length.replace_noise(self.neftune_hook_handle)

    def declare_length_of(self, dataset: Any) -> None:
        """Also pad to the longest row of a dataset that only a call names, if lengths follow from data."""
        if vars(self.args).get("max_length") is not None or not isinstance(self.data_collator, StaticShapeCollator):
            return
        lengths = row_lengths(dataset) or [0]
        if max(lengths) > max(self.lengths, default=0):
            self.lengths = self.data_collator.lengths = [*self.lengths, length_for(lengths)]
            self.find_lengths_asked_for()

    def note_data(self) -> None:
        """Note the datasets and the collator that batches are made static for."""
        self._noted_data = named_datasets(vars(self))
        self._noted_collator = self.data_collator

    def take_up_data(self) -> None:
        """Take up a collator and datasets that the caller has put in the place of the trainer's since they were noted."""
        if not self.backend.static_shapes:
            return
        if self.data_collator is not self._noted_collator:
            self._make_batches_static()
        for name, dataset in named_datasets(vars(self)).items():
            if dataset is not self._noted_data.get(name):
                self.declare_length_of(dataset)
        self.note_data()

    def check_ranges(self, batch: Mapping[str, Any]) -> None:
        """Refuse (`ValueError`) a batch on the host with token ids, positions or labels that the model has no place for."""
        if not self._ranges:
            owner = self._owner_of_loss
            own_loss = self.compute_loss_func is None and owner.__module__ in _LOSSES_BY_LABELS
            truncates = "max_length" in vars(self.args) and not isinstance(self.args, PaddedArguments)
            truncation = f"{type(self.args).__name__}(max_length={{}})" if truncates else _TRUNCATION
            self._ranges = [IndexRanges(self.model, own_loss, truncation), *self._more_ranges()]
            # A loss of the user's may take labels for something else than classes.
            is_of_user = self.compute_loss_func is not None or not is_known(owner.__module__)
            self._ranges_of_labels = IndexRanges(self.model, labels=True) if is_of_user else None
        for ranges in self._ranges:
            ranges.check(batch)
        if self._ranges_of_labels is not None:
            try:
                self._ranges_of_labels.check(batch)
            except UserError as error:
                self._ranges_of_labels = None
                logger.warning(
                    f"{error} Your own loss may take labels for something else. A cross-entropy of XLA leaves such a label out without a "
                    "word, where eager PyTorch raises an IndexError."
                )

    def _more_ranges(self) -> list[IndexRanges]:
        """What else a batch is held against."""
        return []

    @property
    def _owner_of_loss(self) -> type:
        """The class that computes the loss: upstream's, or one of the user's."""
        return owner_of(type(self), "compute_loss", ours=False)

    def find_lengths_asked_for(self) -> None:
        """Find what models derive from the length of a batch, and refuse (`ValueError`) where that is not known."""
        longest = max(self.step_lengths) if self.lengths else None
        self.by_length = BatchLength([self.model, *self.other_models()], longest, class_that_sees_padding(self.model))
        if self.generates and self.by_length.rope_scaling is not None:
            raise UserError(_why_not_scaled(*self.by_length.rope_scaling, "a model writes text"))
        if self.predicted_text is None:
            return
        # An evaluation in the middle of the run would find it too late.
        new_tokens = self.args.generation_max_new_tokens
        most = None if longest is None else longest + new_tokens
        if (scaling := BatchLength([self.model], most).rope_scaling) is not None:
            rope_type, num_unscaled = scaling
            why = f"a model writes up to {new_tokens} tokens after the prompt of a row"
            raise UserError(_why_not_scaled(rope_type, num_unscaled - new_tokens, why))

    def shape_batch(
        self, inputs: dict[str, Any], rows_of_example: int | None = None
    ) -> tuple[dict[str, Any], int, int]:
        """
        Give a batch on the host a shape that a program is there for, or will be. Returns the batch, completed if that
        is possible, its rows, and those that a batch should have, of which so many are one example if the collator has
        said so. Ever new shapes are a `ValueError`.
        """
        mode, num_rows = (
            ("train", self._train_batch_size) if self.model.training else ("eval", self.args.eval_batch_size)
        )
        rows, guards = count_rows(inputs), self._shape_guards
        # The collator that wraps the trainer's says it of each batch.
        of_own_loader = rows_of_example is None
        rows_of_example = rows_of_example or self._rows_of_example.setdefault(mode, max(1, rows // num_rows))
        num_rows *= rows_of_example
        if rows < num_rows:
            # Chips that compute gradients by themselves take as many rows each.
            local = mode == "train" and self.chips.local_gradients is not None
            reason = None if local else self.why_not_padded(mode, inputs)
            if reason is None and rows_of_example > 1:
                reason = f"{rows_of_example} rows are one example"
            if reason is None:
                inputs, rows = pad_rows(inputs, num_rows, self._pad_token_id), num_rows
            else:
                guards = self._last_batch_guards
                if mode not in self._said:
                    self._said.add(mode)
                    graph = "training" if mode == "train" else "evaluation"
                    fix = "dataloader_drop_last=True drops such batches"
                    if mode == "eval":
                        divides = "A per_device_eval_batch_size that divides the rows leaves none over"
                        fix = f"{divides}; {fix}, whose rows an evaluation then lacks"
                    logger.warning(
                        f"The last batch has {rows} of {num_rows} rows and is not padded, which compiles one more {graph} graph: "
                        f"{reason}. {fix}."
                    )
        if self.backend.processes.row_shards > 1:
            inputs = self._agree_on_shape(inputs)
        guards[mode].check(inputs, of_own_loader)
        return inputs, rows, num_rows

    def _agree_on_shape(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Give a batch on the host the shape that those of other processes have: the greatest of their declared lengths."""
        rows = count_rows(batch)
        has_length = bool(self.lengths) and "input_ids" in batch
        most, least, length = self.backend.processes.most([rows, -rows, length_of(batch) if has_length else 0])
        if most != -least:
            raise UserError(
                f"Processes have batches of {-least} to {most} rows for the same step, and this one of {rows}, but all need the same "
                "number. Set dataloader_drop_last=True to drop last batches, or have your sampler yield as many rows to each."
            )
        return pad_columns(batch, length, self._pad_token_id) if has_length else batch

    def _say_padded(self, batch: Mapping[str, Any]) -> None:
        """Say what the columns that were added to a batch are padded with, where that may change a result."""
        self._said.add("columns")
        # TRL's own collators pad, too.
        reason = self._why_loss_counts_tokens() if upstream_of(type(self)) is Trainer else None
        if (own_code := self.own_code_in_step("train")) is not None:
            reason = (
                f"{own_code}, which may count masked tokens (where it leaves out labels of -100, no number changes)"
            )
        if reason is None:
            return
        ids = batch["input_ids"]
        pads = ", ".join(
            f"{key} {pad_value_of(key, self._pad_token_id)}"
            for key, value in batch.items()
            if isinstance(value, torch.Tensor) and value.shape[: ids.ndim] == ids.shape
        )
        logger.warning(
            f"Rows are padded to {length_of(batch)} tokens ({pads}): {reason}. Upstream's trainer computes the same for data "
            "of that length."
        )

    def send_batch(
        self, inputs: dict[str, Any], numbers: Mapping[str, Any] | None = None
    ) -> dict[str, dict[Hashable, Any]]:
        """As [`~BatchesMixin._send_rows`], of a batch as it comes from the data."""
        self.check_ranges(inputs)
        host_batch = {key: value for key, value in inputs.items() if not self._is_unread_text(value)}
        is_collated = isinstance(inputs, CollatedBatch)
        # A collator of the caller's may yield more rows than it was given.
        batch, rows, num_rows = self.shape_batch(host_batch, inputs.rows_of_example if is_collated else None)
        if self.status is not None and self.model.training and "input_ids" in batch:
            # Batches are added up by the columns that all processes have agreed on.
            self.status.count(host_batch, batch["input_ids"].shape)
        if is_collated and "input_ids" in batch:
            # What was not padded before may be now, to the length of other processes.
            dim, length = inputs.columns_before.get("input_ids", (1, inputs["input_ids"].shape[1]))
            if length < (columns := batch["input_ids"].shape[dim]):
                self.by_length.check_columns(length, columns)
                counts_all = self.model.training or predicts_spans(self.model)
                if counts_all and "columns" not in self._said and not vars(self.args).get("packing"):
                    self._say_padded(batch)
        batch = {**batch, **self.data_by_length(inputs)}
        return self._send_rows(batch, rows, numbers, whole=rows <= num_rows and rows % self.backend.num_chips != 0)

    def data_by_length(self, inputs: Mapping[str, Any]) -> dict[Hashable, torch.Tensor]:
        """What goes to the device with a batch because models ask for its length, see [`BatchLength`]."""
        if not self.by_length.asks:
            return {}
        length = inputs.length if isinstance(inputs, CollatedBatch) else length_of(inputs)
        sequences = [key for key in inputs if key.endswith("input_ids") and key != "decoder_input_ids"]
        if self.by_length.rope_scaling is not None and len(sequences) > 1:
            raise UserError(_why_not_scaled(*self.by_length.rope_scaling, f"a batch has {' and '.join(sequences)}"))
        return self.by_length.data(length, inputs.get("position_ids"))

    def _is_unread_text(self, value: Any) -> bool:
        """Whether a column of a batch is text, which only code of the user's looks at in a step."""
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            return False
        if self._reads_texts is None:
            self._reads_texts = self.own_code_in_step("train") is not None
        return not self._reads_texts

    def _send_rows(
        self, batch: dict[Hashable, Any], rows: int, numbers: Mapping[str, Any] | None = None, whole: bool = False
    ) -> dict[str, dict[Hashable, Any]]:
        """
        Send a batch of a declared shape, with its rows split over the chips, or with all of them to every chip. Tensors among
        `numbers` go in the same transfer. Returns both, by `"batch"` and `"numbers"`.
        """
        self.batch_under_way = batch
        data = {"batch": dict(batch), "numbers": dict(numbers or {})}
        device_data = self.backend.send(data) if whole else self.backend.send_rows(data, rows)
        self.agreement.batch_sent()
        return device_data

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if not self.backend.static_shapes:
            return super()._prepare_inputs(inputs)
        if isinstance(inputs, PreparedBatch):
            # An override of `training_step` or `prediction_step` has called this, and calls upstream's method, which does, too.
            return inputs
        device_batch = inputs if isinstance(inputs, SentBatch) else self.send_batch(inputs)["batch"]
        if self.backend.manual_sharding.active:
            rows = count_rows(device_batch)
            device_batch = {
                key: self.backend.manual_sharding.full_to_shard(
                    value, by_rows=value.ndim > 0 and value.shape[0] == rows
                )
                if isinstance(value, torch.Tensor)
                else value
                for key, value in device_batch.items()
            }
        batch = PreparedBatch(self.by_length.take(device_batch))
        # A copy of what was prepared before has them no more.
        self.segment_ids = batch.pop("segment_ids", None if isinstance(inputs, SentBatch) else self.segment_ids)
        return batch

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        if not self.backend.static_shapes:
            return super()._get_num_items_in_batch(batch_samples, device)
        has_labels = batch_samples and isinstance(labels := batch_samples[0].get("labels"), torch.Tensor)
        if has_labels and labels.device == device:
            # It is a batch of an evaluation, and on its way. On the device the count is part of its program.
            with self.chips.gather_over_chips(self.accelerator):
                return super()._get_num_items_in_batch(batch_samples, device)
        # Counted on the host: on the device the count would be part of the first micro-step's program only.
        count = super()._get_num_items_in_batch(batch_samples, torch.device("cpu"))
        if not isinstance(count, torch.Tensor):
            return count
        # A step that may be replayed sends it with the batch.
        return count.float() if self.steps.compiled is not None else self.backend.send(count.float())

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if isinstance(inputs, CollatedBatch) and inputs.num_tokens is not None:
            (tokens,) = self.backend.processes.total([inputs.num_tokens])
            self.state.num_input_tokens_seen += int(tokens)
        elif self.args.include_num_input_tokens_seen != "no":
            with self.chips.gather_over_chips(self.accelerator):
                super()._track_num_input_tokens(inputs)

    @property
    def _count_tokens(self) -> Callable[[Mapping[str, Any]], int] | None:
        """What counts the tokens of a batch as upstream's collator yields it, by `include_num_input_tokens_seen`."""
        # Upstream's default, for models that are not of transformers.
        main_input = getattr(self.model, "main_input_name", "input_ids")
        if self.args.include_num_input_tokens_seen == "no" or main_input != "input_ids":
            return None
        if self.args.include_num_input_tokens_seen != "non_padding":
            return count_all
        tokenizer = self.processing_class
        pad_token = tokenizer.pad_token_id if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        dataset = self.train_dataset
        if pad_token is None and isinstance(dataset, Dataset) and "attention_mask" not in dataset.column_names:
            # In upstream's words and by its logger, for those who look for it.
            logging.get_logger(Trainer.__module__).warning(
                "Could not determine method to count non-padding tokens, falling back to counting all tokens."
            )
        return partial(count_not_padding, pad_token)

    # ---- What rows can be added to ----

    def why_not_padded(self, mode: str, batch: Mapping[str, Any] | None = None) -> str | None:
        """
        Why rows cannot be added to a batch for `"train"` or `"eval"`, as a clause. Without a batch, the answer
        is about the trainer and its model.
        """
        own_code = self.own_code_in_step(mode)
        if own_code is not None:
            return f"{own_code}, which may count masked tokens"
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                mode == "train" or not module.track_running_stats
            ):
                return f"{type(module).__name__} takes the mean over the rows of a batch"
        if mode == "eval" and batch is not None and self.lacks_labels(batch):
            return None
        reason = self._why_loss_counts_tokens()
        if reason is None and batch is not None:
            reason = why_targets_count(unwrap_peft_model(self.model), batch)
        return reason

    def lacks_labels(self, batch: Mapping[str, Any]) -> bool:
        """Whether upstream predicts a batch without a loss: it has no labels, or not all, and the model takes some."""
        by_upstream = owner_of(type(self), "prediction_step", ours=False) in (Trainer, Seq2SeqTrainer)
        return by_upstream and any(batch.get(name) is None for name in self.label_names)

    def own_code_in_step(self, mode: str) -> str | None:
        """Name code of the user's that runs within a step of `"train"` or `"eval"`, as a clause."""
        methods = METHODS_OF_A_STEP if mode == "train" else METHODS_OF_A_PREDICTION
        if mode == "eval" and self._preprocess_on_device is not None:
            return "preprocess_logits_for_metrics is user code"
        return find_own_code(self, [self.model, *self.other_models()], methods)

    def _why_loss_counts_tokens(self) -> str | None:
        """Why the loss may count tokens that are masked, as a clause."""
        owner = self._owner_of_loss
        if owner is not Trainer:
            what = "is a mean over rows" if owner is upstream_of(type(self)) else "may count masked tokens"
            return f"the loss of {owner.__name__} {what}"
        return why_model_counts_tokens(unwrap_peft_model(self.model))
