"""Logs of a trainer: what it trained with, and where the time went."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...callbacks.run_lines import RunLines
from ...callbacks.run_record import RunRecord
from ...callbacks.step_status import StepStatus
from ...layers.flops import read_dimensions, step_flops
from ...quantization.packed_linear import count_parameters
from .facts import RunFactsMixin


logger = logging.get_logger(__name__)


class StatusMixin(RunFactsMixin):
    """
    The part of [`TPUTrainerMixin`] that logs: the loss and the metrics, which on XLA are read in one transfer, and the
    phases of steps, see [`StepStatus`].
    """

    #: What times the steps, or `None` with `step_status=False`.
    status: StepStatus | None = None
    #: What is measured here and has a place in `state.log_history` upstream, too.
    timed_upstream: tuple[str, ...] = ()

    def start_status(self) -> None:
        """Time the steps of the runs to come."""

        def kind_of_step() -> str:
            if not self.compiles_steps:
                return "step"
            return "replay" if self.steps.replays else "trace"

        over_processes = self.backend.processes.total if self.backend.processes.own_rows else None
        self.status = StepStatus(self.backend, kind_of_step, self._flops_of_batch(), over_processes)
        self.add_callback(self.status)

    def keep_record(self, args: TrainingArguments, lines: RunLines) -> None:
        """Keep a record of the runs to come, with the arguments as they were given, and make a report of each."""
        self.add_callback(
            RunRecord(
                self.backend,
                lambda: self.describe_run(args, lines.facts),
                self.status,
                lambda: self.watch.events_of_run if self.backend.static_shapes else (),
                lambda: lines.spent,
                lambda: self.steps.why_traced if self.backend.static_shapes else None,
                lambda: self.sync_monitor.describe() if self.backend.static_shapes else [],
            )
        )

    @property
    def run_record(self) -> RunRecord | None:
        """What keeps the record of the run, if it is kept."""
        return next((each for each in self.callback_handler.callbacks if isinstance(each, RunRecord)), None)

    def phase(self, name: str) -> AbstractContextManager:
        """Context that is a phase of a step, by its name in the last log after `phase/`."""
        return nullcontext() if self.status is None else self.status.clock.phase(name)

    def begin_read(self) -> None:
        """Count the rest of the phase under way as one that reads from the device."""
        if self.status is not None:
            self.status.clock.enter("read")

    def _flops_of_batch(self) -> Callable[[tuple[int, int]], float | None] | None:
        """What counts the arithmetic of a batch of a shape, where this model can be counted."""
        model = unwrap_peft_model(self.model)
        dimensions = read_dimensions(model.config) if isinstance(model, PreTrainedModel) else None
        # A teacher or a reference takes part of the time.
        if dimensions is None or self._runs_other_passes:
            return None
        parameters, num_trained = count_parameters(self.model)
        return cache(partial(step_flops, dimensions, adapters=num_trained if num_trained < parameters else None))

    def _read_train_metrics(self, grad_norm: torch.Tensor | float | None = None) -> dict[str, float]:
        """Read the loss, the gradient norm if there is one, and the metrics, all in one transfer."""
        with self.phase("device"), self.copies.not_made():
            host_values = self.backend.fetch(
                {"grad_norm": grad_norm, "loss": self.loss_log.tensors, "metrics": self.logged_metrics("train")},
                self.begin_read,
            )
        window = self.loss_log.read(host_values["loss"])
        if self.model.training:
            # Where a callback has left it in evaluation, upstream's next log shows them.
            self.take_metrics("train", host_values["metrics"])
        # One NaN would stay in upstream's own sum for good.
        self.reset_upstream_loss()
        self._total_loss_scalar += window.total
        if window.nonfinite:
            step = self.state.global_step - window.steps + window.first_nonfinite
            substitute = "NaN or infinite, too"
            if self.loss_log.filters:
                substitute = "the mean of those before in its place, or 0 (logging_nan_inf_filter=False logs NaN)"
            logger.warning(
                f"The loss was NaN or infinite at step {step} ({window.nonfinite} times in the {window.steps} steps since the last "
                f"log); the logged loss has {substitute}."
            )
        read = {"loss": window.mean}
        if grad_norm is not None:
            value = host_values["grad_norm"]
            read["grad_norm"] = value.item() if isinstance(value, torch.Tensor) else value
        return read

    def reset_upstream_loss(self) -> None:
        """Set the sum of losses that upstream keeps back to 0, where the losses are that are added to it."""
        zero = torch.zeros(())
        # Programs keep it, and upstream's loop is given zeros on the host.
        self._tr_loss = zero if self.steps.compiled is not None else self.backend.send(zero)

    # ---- Upstream's hooks ----

    def store_flos(self) -> None:
        if not self.backend.unknown_upstream:
            super().store_flos()
            return
        (flos,) = self.backend.processes.total([self.current_flos])
        self.state.total_flos += flos
        self.current_flos = 0

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.status is not None:
            self.status.end_step()
        with self.phase("data"), self.copies.not_made():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
    ) -> None:
        with self.agreement.deciding(self.state.global_step, lambda: self.control):
            logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
            reads = nullcontext()
            if logs and self.backend.metrics_on_device:
                # Upstream's own log reads the loss, the gradient norm and every metric one by one. It logs nothing more
                # afterwards, since this one is noted as the last.
                read = self._read_train_metrics(grad_norm)
                read["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(read, start_time)
            elif logs and self.status is not None:
                with self.phase("device"):
                    self.backend.wait()
                # Upstream reads what it logs in here.
                reads = self.phase("read")
            with reads:
                super()._maybe_log_save_evaluate(
                    tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
                )

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.backend.metrics_on_device:
            self._read_train_metrics()
            self._tr_loss = torch.zeros(())
        return super()._finalize_training(trial, num_train_samples, start_time)

    def log(self, logs, start_time=None) -> None:
        measurements = {}
        if self.status is not None:
            measurements = self.status.take_speed() if "loss" in logs else {}
            measurements |= self.status.take_phases() if "train_runtime" in logs else {}
        all_logs, history = {**logs, **measurements}, self.state.log_history
        before = len(history)
        pending = self.is_in_train and self.state.global_step > self._globalstep_last_logged
        if pending and self.model.training and self.backend.metrics_on_device:
            # Called by a callback: upstream shows the metrics so far, and begins anew.
            with self.copies.not_made():
                self.take_metrics("train", self.backend.fetch(self.logged_metrics("train"), self.begin_read))
        with self.phase("log"):
            super().log(all_logs, start_time)
        # Callbacks have shown how fast the machine was. The history and the result of a run are upstream's.
        for entry in history[before:]:
            for name in measurements.keys() - set(self.timed_upstream):
                entry.pop(name, None)
        logs.update({name: value for name, value in all_logs.items() if name not in measurements})

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", **kwargs):
        self.take_up_changes()
        self.declare_length_of(eval_dataset)
        with self.phase("eval"):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        with self.phase("save"):
            super()._save_checkpoint(model, trial)
