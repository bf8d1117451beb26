"""Supervised fine-tuning."""

from copy import copy
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import unwrap_peft_model
from trl import SFTConfig, SFTTrainer

from ...callbacks.samples import ShowSamples
from ...data.packing import PackedCollator
from ...errors import UserError
from ..checkpoint.saving import UPSTREAM_METRICS
from ..checks.chat_template import check_chat_template, has_generation_markers, training_chat_template
from ..checks.datasets import check_dataset, named_datasets, trained_columns
from ..checks.families import why_not_packed
from ..checks.lost_rows import describe_answers, describe_lost
from ..checks.messages import first_row
from ..checks.rows import TEXT_OR_MESSAGES, naming_rows
from ..checks.upstream import upstream_names
from ..configs import ExtensionArguments, TPUSFTConfig
from ..mixin import TPUTrainerMixin
from ..run.text import TextGeneration
from .distillation import KD_METRICS, DistillationMixin, distills
from .quantization import QuantizationMixin


class TPUSFTTrainer(DistillationMixin, QuantizationMixin, TPUTrainerMixin, SFTTrainer):
    """
    [`~trl.SFTTrainer`] that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~trl.SFTTrainer`] takes, a plain [`~trl.SFTConfig`] included, and logs the same metrics with
    the same values. Arguments are not changed. On XLA the batches of a data collator are padded to the declared lengths.

    Example:

    ```python
    >>> from hf_tpu_ext import TPUSFTTrainer as SFTTrainer
    >>> from datasets import load_dataset

    >>> trainer = SFTTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    ... )
    >>> trainer.train()
    ```

    Raises:
        `ValueError`: A setting or a dataset does not work; the message says what to do instead.
    """

    evaluation_metrics = (UPSTREAM_METRICS, ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss", *KD_METRICS))

    def _complete_arguments(self, args, model) -> TrainingArguments:
        if isinstance(args, TrainingArguments) and not isinstance(args, SFTConfig):
            # Upstream would do so after the arguments were pointed to the device, and find another one.
            config_cls = TPUSFTConfig if isinstance(args, ExtensionArguments) else SFTConfig
            return config_cls(**{**args.to_dict(), "hub_token": args.hub_token})
        return super()._complete_arguments(args, model)

    def _check_data(self, trainer_kwargs) -> None:
        for name, dataset in named_datasets(trainer_kwargs).items():
            has_formatting_func = trainer_kwargs.get("formatting_func") is not None
            check_dataset(dataset, name, trainer_kwargs["args"], has_formatting_func)

    def _set_up(self, call) -> None:
        names: dict[str, Any] = {
            "has_generation_markers": has_generation_markers,
            "get_training_chat_template": training_chat_template,
        }
        args = call.arguments["args"]
        if isinstance(args, TPUSFTConfig) and args.from_scratch:
            if not isinstance(call.arguments.get("model"), str):
                raise UserError(
                    "from_scratch=True makes a model from its name, and this one is there already. Pass model='...', or leave from_scratch out."
                )
            set_seed(args.seed)
            names["create_model_from_path"] = _initialize
        with upstream_names(type(self), **names):
            super()._set_up(call)

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        prepare, settings = super()._prepare_dataset, (processing_class, args, packing, formatting_func, dataset_name)
        # What a function of the user's makes text of is its own.
        columns = () if formatting_func is not None else (*TEXT_OR_MESSAGES, args.dataset_text_field)
        check_chat_template(dataset, f"{dataset_name} dataset", columns, processing_class, args)
        datasets_by_name = {f"the {dataset_name} dataset": dataset}
        with naming_rows(datasets_by_name, columns, lambda row: prepare(row, *settings), args.assistant_only_loss):
            if not isinstance(dataset, Dataset):
                return prepare(dataset, *settings)
            # Tokens first, for their number to be known. Upstream goes on from there with the same files of its cache.
            without_limit = copy(args)
            without_limit.max_length, without_limit.shuffle_dataset = None, False
            whole = prepare(dataset, processing_class, without_limit, False, formatting_func, dataset_name)
            if not len(whole):
                # Without a column that upstream keeps, no row is left to go on from.
                return whole
            prepared = prepare(whole, processing_class, args, packing, None, dataset_name)
        own_columns = columns and trained_columns(first_row(dataset), args.dataset_text_field)
        with_answers = {"completion", "messages", "conversations"} & {*own_columns}
        of_answers = describe_answers(dataset, dataset_name, with_answers)
        self.tell_of_rows(of_answers + describe_lost(whole, prepared, dataset_name, args, packing))
        return prepared

    def _finish_set_up(self) -> None:
        self._prepare_fake_quantization()
        if distills(self.args):
            self._prepare_teacher()
        if isinstance(self.args, TPUSFTConfig) and self.args.show_samples:
            self._show_samples(self.args.show_samples)

    def _show_samples(self, count: int) -> None:
        if not isinstance(self.eval_dataset, Dataset):
            raise UserError(
                f"show_samples={count} takes prompts from the evaluation set, but there is none to take them from. Pass "
                "one eval_dataset (eval_strategy: steps in a recipe), or leave show_samples out."
            )
        rows = [self.eval_dataset[index] for index in range(min(count, len(self.eval_dataset)))]
        config = GenerationConfig(
            max_new_tokens=ShowSamples.max_new_tokens, do_sample=False, pad_token_id=self._pad_token_id
        )
        text = TextGeneration(self, config)

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            with self.phase("samples"):
                return text.generate(prompts).token_ids

        callbacks, record = self.callback_handler.callbacks, self.run_record
        keep = None if record is None else record.keep_samples
        samples = ShowSamples(self._tokenizer, rows, generate, keep)
        # Before the end of the record, of which the report is made.
        callbacks.insert(len(callbacks) if record is None else callbacks.index(record), samples)

    def _more_metrics(self) -> tuple[str, ...]:
        return (*super()._more_metrics(), *(KD_METRICS if distills(self.args) else ()))

    # ---- Static shapes ----

    _config_name = TPUSFTConfig.__name__

    def _make_batches_static(self) -> None:
        if self.padding_free:
            model = unwrap_peft_model(self.model)
            if (reason := why_not_packed(model)) is not None:
                # Where eval_packing is left out, evaluation sets are packed as the training set is.
                names = [name for name in ("packing", "eval_packing") if vars(self.args)[name]]
                raise UserError(
                    f"{' and '.join(f'{name}=True' for name in names)} does not work with {type(model).__name__}: {reason}. Set "
                    f"{' and '.join(f'{name}=False' for name in names)}; length_buckets keeps the padding low."
                )
            # Upstream would flatten the batch into one row of another length each time.
            self.data_collator = PackedCollator(self._pad_token_id, self.args.max_length, self._count_tokens)
        else:
            super()._make_batches_static()

    # ---- Loss and metrics ----

    def _why_loss_counts_tokens(self) -> None:
        # SFT's loss is a sum over the tokens with a label, whatever the model.
        return None

    def _loss_sums_tokens(self, model) -> bool:
        return self.model_accepts_loss_kwargs and self.compute_loss_func is None


def _initialize(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    **of_loading: Any,
) -> PreTrainedModel:
    """TRL's `create_model_from_path` without the weights, in float32 if the dtype would be that of these."""
    if quantization_config is not None:
        raise UserError(
            "from_scratch=True trains random weights, which are not quantized. Leave the quantization out."
        )
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_config(
        config,
        dtype="float32" if dtype in (None, "auto") else dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
