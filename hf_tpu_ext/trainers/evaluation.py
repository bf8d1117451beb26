"""Evaluation and prediction on the compiled path."""

import math
from typing import Any

import torch
from accelerate.utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, has_length

from ..step.metrics import DeviceSums


class CompiledEvaluation:
    """
    The part of [`TPUTrainerMixin`] that evaluates and predicts.

    On XLA the loss of an evaluation is summed on the device and read once, and a batch counts by its own rows, whatever was
    added to complete it. On CUDA and CPU every method is upstream's.
    """

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if not self.backend.lazy or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        rows = find_batch_size(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self._preprocess_on_device is not None:
            logits = self._preprocess_on_device(logits, labels)
        self.end_program("prediction step", f"prediction after step {self.state.global_step}")
        # What upstream would concatenate on the device, a program per number of batches, is put together on the host.
        # There the rows that completed the batch are cut off.
        loss, logits, labels = self.backend.fetch((loss, logits, labels))
        return loss, _first_rows(logits, rows), _first_rows(labels, rows)

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        with self.frozen_weights_in_bfloat16(), self.split_activations():
            return self._evaluation_loop(*args, **kwargs)

    def _evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not self.backend.lazy:
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if not loss_only:
            return self._predicting_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        model = self._wrap_model(self.model, training=False)
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        sums = DeviceSums(self.backend, floats=("loss", "rows"), integers=())
        num_samples = 0
        for inputs in dataloader:
            rows = find_batch_size(inputs)
            num_samples += rows
            loss, _, _ = self.prediction_step(model, inputs, prediction_loss_only=True)
            # Like upstream: a batch counts by its rows, and losses that are not finite are left out. The row count is
            # sent as data, for the last batch to be the same program.
            weight = self.backend.send(torch.tensor(float(rows)))
            finite = torch.isfinite(loss)
            sums.add(
                loss=torch.where(finite, loss.float() * weight, torch.zeros_like(weight)),
                rows=torch.where(finite, weight, torch.zeros_like(weight)),
            )
            self.end_program("evaluation step", f"evaluation after step {self.state.global_step}")
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.gather_function = self.accelerator.gather_for_metrics
        fetched = self.backend.fetch({"loss": sums.tensors, "metrics": self._metric_sums("eval")})
        self._take_metrics("eval", fetched["metrics"])
        rows = fetched["loss"]["rows"].item()
        metrics = {f"{metric_key_prefix}_loss": fetched["loss"]["loss"].item() / rows if rows else math.nan}
        if has_length(dataloader.dataset):
            num_samples = len(dataloader.dataset)
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_samples)

    def _predicting_loop(self, *args) -> EvalLoopOutput:
        # Logits are cut down on the device, in the program that makes them, and not once more on the host.
        self._preprocess_on_device, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            output = super().evaluation_loop(*args)
        finally:
            self.preprocess_logits_for_metrics, self._preprocess_on_device = self._preprocess_on_device, None
        self._take_metrics("eval", self.backend.fetch(self._metric_sums("eval")))
        return output


def _first_rows(value: Any, rows: int) -> Any:
    """The first rows of (nested) tensors, in float32 where they are of a shorter floating-point type."""
    if isinstance(value, (list, tuple)):
        return type(value)(_first_rows(item, rows) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    value = value[:rows] if value.ndim and value.shape[0] > rows else value
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
