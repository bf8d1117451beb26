"""Supervised fine-tuning."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import get_config_model_id

from ..callbacks.samples import ShowSamples
from ..data import PackedCollator, StaticShapeCollator
from ..step.looped_head import score_tokens
from ..step.metrics import DeviceSums
from ..step.replaced_head import head_computed_by
from .checkpoints import leaving_no_empty_dir
from .configs import ExtensionArguments, TPUSFTConfig
from .dataset_checks import check_dataset, named_datasets
from .distillation import KD_METRICS, DistillationMixin, distills
from .lengths import declare_lengths, pad_token_of
from .mixin import TPUTrainerMixin
from .saving import UPSTREAM_METRICS


class TPUSFTTrainer(DistillationMixin, TPUTrainerMixin, SFTTrainer):
    """
    [`~trl.SFTTrainer`] that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~trl.SFTTrainer`] takes, a plain [`~trl.SFTConfig`] included, and logs the same metrics with
    the same values.

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

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            As [`~trl.SFTTrainer`].
        args ([`TPUSFTConfig`] or [`~trl.SFTConfig`] or [`~transformers.TrainingArguments`], *optional*):
            Arguments. They are not changed.
        data_collator ([`~transformers.DataCollator`], *optional*):
            As [`~trl.SFTTrainer`]. On XLA its batches are padded to the declared lengths.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            As [`~trl.SFTTrainer`].
        eval_dataset ([`~datasets.Dataset`] or `dict`, *optional*):
            As [`~trl.SFTTrainer`].
        **kwargs:
            [`~trl.SFTTrainer`]'s other arguments.

    Raises:
        `ValueError`: A setting or a dataset does not work; the message says what to do instead.
    """

    evaluation_metrics = (
        UPSTREAM_METRICS,
        ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss", *KD_METRICS),
    )

    def __init__(
        self,
        model=None,
        args: TrainingArguments | None = None,
        data_collator=None,
        train_dataset=None,
        eval_dataset=None,
        *rest,
        **kwargs,
    ):
        for name, dataset in named_datasets(train_dataset, eval_dataset).items():
            check_dataset(dataset, name, args, has_formatting_func=kwargs.get("formatting_func") is not None)
        if isinstance(args, TrainingArguments) and not isinstance(args, SFTConfig):
            # Upstream would do so after the arguments were pointed to the device, and find another one.
            config_cls = TPUSFTConfig if isinstance(args, ExtensionArguments) else SFTConfig
            args = config_cls(**{**args.to_dict(), "hub_token": args.hub_token})
        args = self._default_args(model) if args is None else args
        with leaving_no_empty_dir(args.output_dir):
            super().__init__(model, args, data_collator, train_dataset, eval_dataset, *rest, **kwargs)
            if distills(self.args):
                self._prepare_teacher()
            if isinstance(args, TPUSFTConfig) and args.show_samples:
                self._show_samples(args.show_samples)

    def _show_samples(self, count: int) -> None:
        if not isinstance(self.eval_dataset, Dataset):
            raise ValueError(
                f"show_samples={count} takes prompts from the evaluation set, but there is none to take them from. Pass "
                "one eval_dataset (eval_strategy: steps in a recipe), or leave show_samples out."
            )
        rows = [self.eval_dataset[index] for index in range(min(count, len(self.eval_dataset)))]
        self.add_callback(ShowSamples(self.backend, self._tokenizer, rows, self.compute_loss_context_manager))

    def _default_args(self, model) -> SFTConfig:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return SFTConfig(f"{name.split('/')[-1]}-SFT")

    def _prepare_compiled_path(self) -> None:
        if self._is_vision_dataset:
            raise ValueError(
                "Datasets with images do not train on XLA: the number of image tokens changes the program with every "
                "batch. Train on CUDA (backend='cuda'), or drop the image column."
            )
        floats = [
            "entropy",
            "mean_token_accuracy",
            "aux_loss",
            "batches",
            *(KD_METRICS if distills(self.args) else ()),
        ]
        self._sums = {mode: DeviceSums(self.backend, floats, ("num_tokens",)) for mode in ("train", "eval")}
        super()._prepare_compiled_path()

    # ---- Static shapes ----

    @property
    def _pad_token_id(self) -> int:
        return pad_token_of(self._tokenizer)

    @property
    def _config_name(self) -> str:
        return TPUSFTConfig.__name__

    @property
    def _packs_rows(self) -> bool:
        return self.args.packing

    def _declare_lengths(self) -> list[int]:
        if self.args.packing:
            return [self.args.max_length]
        return declare_lengths(
            self.args.length_buckets if isinstance(self.args, ExtensionArguments) else None,
            self.args.max_length,
            self._train_lengths,
            self._train_batch_size,
            self.args.train_sampling_strategy,
        )

    def _make_batches_static(self) -> None:
        if self.padding_free:
            # Upstream would flatten the batch into one row of another length each time.
            self.data_collator = PackedCollator(self._pad_token_id, self.args.max_length, self._counts_input_tokens)
        else:
            self.data_collator = StaticShapeCollator(
                self.data_collator, self.lengths, self._pad_token_id, self._config_name, self._counts_input_tokens
            )

    # ---- Loss and metrics ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Around what a teacher puts there instead.
        with head_computed_by(partial(score_tokens, self.backend)) if self.backend.traces_steps else nullcontext():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _why_loss_counts_tokens(self) -> None:
        # It is a sum over the tokens with a label, whatever the model.
        return None

    def _loss_sums_tokens(self, model) -> bool:
        return self.model_accepts_loss_kwargs and self.compute_loss_func is None

    def _compute_loss(self, model, inputs, return_outputs, num_items_in_batch):
        # The loss of `SFTTrainer.compute_loss` and its metrics, which upstream reads from the device one by one.
        mode = "train" if self.model.training else "eval"
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        logits_inputs = {key: value for key, value in inputs.items() if key != "labels"}
        full_logits = None
        if self.compute_loss_func is not None:
            full_logits = model(**logits_inputs)
            loss = self.compute_loss_func(full_logits, inputs.get("labels"), num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and self.args.loss_type == "nll":
            full_logits = model(**logits_inputs)
            loss = self.label_smoother(
                full_logits, inputs["labels"], shift_labels=True, num_items_in_batch=num_items_in_batch
            )
        if full_logits is not None:
            with torch.no_grad(), self.tokens_stay_on_chips():
                outputs = model(**inputs, fused_lm_head=True)
        else:
            with self.tokens_stay_on_chips():
                outputs = model(**inputs, fused_lm_head=True)
            loss = self._token_loss(outputs, num_items_in_batch)
        self._add_metrics(mode, inputs, outputs)
        if not return_outputs:
            return loss
        if full_logits is None:
            with torch.no_grad():
                full_logits = model(**logits_inputs)
        return loss, full_logits

    def _token_loss(self, outputs, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
        per_token_loss = -outputs.log_probs  # zero on ignored positions
        if self.args.loss_type == "dft":
            # Dynamic fine-tuning: https://huggingface.co/papers/2508.05629
            per_token_loss = per_token_loss * outputs.log_probs.exp().detach()
        num_tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = per_token_loss.sum() / num_tokens.clamp(min=1)
        if self.aux_loss_enabled:
            aux_loss = self.router_aux_loss_coef * outputs.aux_loss
            if num_items_in_batch is not None:
                # A mean per micro-batch. The number of micro-batches differs at the end of an epoch, so it is data.
                data = self.step_data if self.model.training else self.backend.send(self._step_data())
                aux_loss = aux_loss / data["micro_steps"]
            loss = loss + aux_loss
        return loss

    def _step_data(self) -> dict[str, torch.Tensor]:
        if not self.aux_loss_enabled:
            return super()._step_data()
        return {"micro_steps": torch.tensor(float(self.current_gradient_accumulation_steps))}

    def _step_tensors(self) -> list[torch.Tensor]:
        return [*super()._step_tensors(), *self._sums["train"].tensors.values()]

    def _add_metrics(self, mode: str, inputs: dict[str, Any], outputs) -> None:
        num_valid = self.over_chips(outputs.label_mask.sum())
        has_valid = (num_valid > 0).float()
        per_token = has_valid / num_valid.clamp(min=1)
        sums = self._sums[mode]
        sums.add(
            entropy=self.over_chips(outputs.entropy.detach().sum()) * per_token,
            mean_token_accuracy=self.over_chips(outputs.is_top1.sum()) * per_token,
            batches=torch.ones_like(per_token),
        )
        if mode == "train":
            sums.add(num_tokens=self.over_chips(inputs["attention_mask"].sum()))
        if self.aux_loss_enabled:
            sums.add(aux_loss=outputs.aux_loss)

    def _metric_sums(self, mode: str) -> dict[str, torch.Tensor]:
        # An evaluation shows the tokens trained on so far, too.
        return {**self._sums[mode].tensors, "num_tokens": self._sums["train"].tensors["num_tokens"]}

    def _take_metrics(self, mode: str, fetched: dict[str, torch.Tensor]) -> None:
        values = {name: tensor.item() for name, tensor in fetched.items()}
        self._total_train_tokens += values["num_tokens"]
        self._sums["train"].reset(["num_tokens"])
        batches = values["batches"]
        if not batches:
            return
        self._sums[mode].reset()
        names = ["entropy", "mean_token_accuracy"] + ["aux_loss"] * self.aux_loss_enabled
        names += KD_METRICS if self.teacher is not None else ()
        # Upstream's `log` shows the mean of these lists.
        self._metrics[mode].update({name: [values[name] / batches] for name in names})
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def _drop_metrics(self, mode: str) -> None:
        if self.backend.metrics_on_device:
            # Tokens were trained on, whatever came of the run.
            self._sums[mode].reset({*self._sums[mode].tensors} - {"num_tokens"})
        self._metrics[mode].clear()

    # ---- Checkpoints ----

    def _run_state(self) -> dict[str, Any]:
        pending = 0
        if self.backend.metrics_on_device:
            pending = self.backend.fetch(self._sums["train"].tensors["num_tokens"]).item()
        return {"num_tokens": self._total_train_tokens + pending}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        self._total_train_tokens = state.get("num_tokens", 0)
        if self.backend.metrics_on_device:
            self._sums["train"].reset(["num_tokens"])
