"""The last batch of an epoch, which has fewer rows than the others."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.models.auto import modeling_auto
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ..data import ShapeGuard, complete_rows, count_rows
from .replay import METHODS_OF_A_STEP, is_known, owner_of


logger = logging.get_logger(__name__)

_METHODS_OF_A_PREDICTION = ("prediction_step", "compute_loss", "compute_loss_context_manager", "_prepare_inputs")


def _classes_for(*tasks: str) -> set[str]:
    names: set[str] = set()
    for task in tasks:
        for entry in vars(modeling_auto)[f"MODEL_FOR_{task}_MAPPING_NAMES"].values():
            names.update([entry] if isinstance(entry, str) else entry)
    return names


#: Models of transformers whose loss is a cross-entropy over the labels that are not -100: one for each token...
_TOKEN_MODELS = _classes_for("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "TOKEN_CLASSIFICATION")
#: ... or one for each row, if they are classes.
_ROW_MODELS = _classes_for("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION")


class RaggedBatchesMixin:
    """
    The part of [`TPUTrainerMixin`] that gives every batch, and above all the last one of an epoch, its shape.

    Rows that are masked out are added to the last batch where that is known to change nothing: the loss is upstream's
    own, over the labels that are not -100, and no code looks at the rows of a batch together. Otherwise the last batch
    keeps its own shape, which is one more program, and a line says so.
    """

    def expect_batches(self, mode: str) -> None:
        """
        Begin a pass over data, whose batches have the declared lengths and whose last one may have fewer rows.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
        """
        limit = max(1, len(self.lengths))
        self._shape_guards[mode] = ShapeGuard(limit, self.lengths, self._config_name)
        self._last_batch_guards[mode] = ShapeGuard(limit, self.lengths, self._config_name)

    def shape_batch(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """
        Give a batch a shape that a program is there for, or will be.

        Args:
            inputs (`dict[str, Any]`):
                Batch on the host.

        Returns:
            `tuple[dict[str, Any], int]`: The batch, completed if that is possible, and the rows that a batch should have.

        Raises:
            `ValueError`: The collator yields ever new shapes.
        """
        mode, wanted = (
            ("train", self._train_batch_size) if self.model.training else ("eval", self.args.eval_batch_size)
        )
        rows, guards = count_rows(inputs), self._shape_guards
        if rows < wanted:
            # Chips that compute gradients by themselves take as many rows each.
            local = mode == "train" and self.local_gradients is not None
            reason = None if local else self.why_not_complete(mode, inputs)
            if reason is None:
                inputs = complete_rows(inputs, wanted, self._pad_token_id)
            else:
                guards = self._last_batch_guards
                self._say_ragged(mode, rows, wanted, reason)
        guards[mode].check(inputs)
        return inputs, wanted

    def _say_ragged(self, mode: str, rows: int, wanted: int, reason: str) -> None:
        if mode in self._said_ragged:
            return
        self._said_ragged.add(mode)
        what = "training" if mode == "train" else "evaluation"
        logger.warning(
            f"The last batch has {rows} of {wanted} rows and keeps this shape, one more {what} program to compile: {reason}. "
            "dataloader_drop_last=True leaves such batches out."
        )

    def why_not_complete(self, mode: str, batch: Mapping[str, Any] | None = None) -> str | None:
        """
        Why rows cannot be added to a batch.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            batch (`Mapping[str, Any]`, *optional*):
                The batch. Without one, the answer is about the trainer and its model.

        Returns:
            `str` or `None`: The reason, as half a sentence.
        """
        own_code = self.own_code_in_step(mode)
        if own_code is not None:
            return f"{own_code}, which would see the rows that complete it"
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                mode == "train" or not module.track_running_stats
            ):
                return f"{type(module).__name__} takes the mean over the rows of a batch"
        reason = self._why_loss_counts_rows()
        if reason is None and batch is not None:
            reason = self._why_targets_count(batch)
        return reason

    def own_code_in_step(self, mode: str) -> str | None:
        """
        Find code of the user's that runs within a step.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.

        Returns:
            `str` or `None`: What it is, as half a sentence.
        """
        for name in METHODS_OF_A_STEP if mode == "train" else _METHODS_OF_A_PREDICTION:
            owner = owner_of(type(self), name)
            if not is_known(owner.__module__):
                return f"{owner.__name__} overrides {name}"
            if name in vars(self):
                return f"{name} of the trainer is code of yours"
        functions = {"compute_loss_func": self.compute_loss_func}
        if mode == "eval":
            functions["preprocess_logits_for_metrics"] = self._preprocess_on_device
        for name, function in functions.items():
            if function is not None:
                return f"{name} is code of yours"
        for path, module in self.model.named_modules():
            if not is_known(type(module).__module__):
                return f"{type(module).__name__} is code of yours"
            if "forward" in vars(module) and not is_known(_module_of(module.forward)):
                return f"the forward of {path or 'the model'} is code of yours"
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                if not is_known(_module_of(hook)):
                    return f"a hook of yours is registered on {path or 'the model'}"
        return None

    def _why_loss_counts_rows(self) -> str | None:
        """Why the loss may count rows whose labels are all -100, as half a sentence."""
        owner = next(cls for cls in type(self).__mro__ if "compute_loss" in vars(cls) and not _is_ours(cls))
        if owner is not Trainer:
            return f"the loss of {owner.__name__} is not known to leave out the rows that complete it"
        model = unwrap_peft_model(self.model)
        name = type(model).__name__
        if name not in _TOKEN_MODELS | _ROW_MODELS or "_loss_function" in vars(model):
            return f"the loss of {name} is not known to leave out the rows that complete it"
        for key, value in model.config.to_dict().items():
            if "z_loss" in key and value:
                return f"{key}={value} looks at every row of a batch"
        return None

    def _why_targets_count(self, batch: Mapping[str, Any]) -> str | None:
        """Why the targets of a batch may not be left out when they are masked, as half a sentence."""
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor):
            return "its targets are not in `labels`" if self.model.training else None
        if labels.is_floating_point():
            return f"no value of `labels` ({_name_of(labels.dtype)}) is left out of the loss"
        others = [key for key in batch if "label" in key and key not in ("labels", "shift_labels")]
        if others:
            return f"`{others[0]}` is not known to be left out of the loss"
        model = unwrap_peft_model(self.model)
        per_row = type(model).__name__ in _ROW_MODELS
        if labels.ndim != (1 if per_row else 2):
            return f"`labels` of shape {tuple(labels.shape)} are not known to be left out of the loss"
        if per_row and (
            model.config.num_labels == 1 or model.config.problem_type not in (None, "single_label_classification")
        ):
            return "no value of `labels` is left out of the loss, a regression"
        return None


def _module_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return function.__module__


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
