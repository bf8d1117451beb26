"""What a trainer says of its runs: facts at the start, logs, and where the time went."""

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, asdict, fields
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from platform import python_version
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import has_length, unwrap_peft_model
from transformers.utils import logging

from ... import __version__
from ...callbacks.run_lines import RunFacts, RunLines
from ...callbacks.run_record import RunRecord
from ...callbacks.step_status import StepStatus
from ...data.padding_report import TokenWaste
from ...errors import UserError
from ...formatting import count, dtype_name, format_bytes
from ...layers.flops import step_flops
from ...quantization.bitsandbytes import find_config
from ...quantization.packed_linear import count_parameters, names_of_packed
from ..checks.datasets import known_columns, named_datasets
from .lengths import share_of_tokens


logger = logging.get_logger(__name__)

# What upstream fills in for fields that were left out, where that is not their default.
_LEFT_OUT: dict[str, Callable[[Any], Any]] = {
    "activation_checkpointing": lambda args: bool(type(args).gradient_checkpointing),
    "bf16": lambda args: not args.fp16,
    "dataloader_pin_memory": lambda args: not args.use_cpu,
    "disable_tqdm": lambda args: False,
    "do_eval": lambda args: args.eval_strategy != "no",
    "eval_steps": lambda args: args.logging_steps,
    "generation_batch_size": lambda args: (
        args.per_device_train_batch_size * args.world_size * args.steps_per_generation
    ),
    # The former name of `activation_checkpointing`.
    "gradient_checkpointing": lambda args: vars(args).get("activation_checkpointing"),
    "greater_is_better": lambda args: not args.metric_for_best_model.endswith("loss"),
    "metric_for_best_model": lambda args: "loss",
    "pad_to_multiple_of": lambda args: None,
    "steps_per_generation": lambda args: args.gradient_accumulation_steps,
}
# What happens to weights that are trained in these.
_FEW_BITS = {
    torch.bfloat16: "an update of less than 1/512 of a weight is rounded away",
    torch.float16: "an update of less than 1/4096 of a weight is rounded away, and squares of small gradients and AdamW's epsilon are 0",
}
# Fields of an adapter's config that PEFT sets by itself.
_OF_THE_MODEL = ("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "task_type")
_PACKAGES = ("torch", "torch_xla", "libtpu", "transformers", "trl", "accelerate", "peft", "datasets")


class StatusMixin:
    """
    The part of [`TPUTrainerMixin`] that says what a run is, and logs: the loss and the metrics, which on XLA are read in one transfer, and the
    phases of steps, see [`StepStatus`].
    """

    #: What times the steps, or `None` with `step_status=False`.
    status: StepStatus | None = None
    #: Names of what is measured here that upstream's `state.log_history` has, too.
    timed_upstream: tuple[str, ...] = ()
    # Whether the next log is that of a step, which all processes make.
    _logs_together = False
    #: Whether the start of a run says how much of its batches is padding, and what is better.
    tells_padding = True

    def start_status(self) -> None:
        """Time the steps of the runs to come."""

        def kind_of_step() -> str:
            if not self.compiles_steps:
                return "step"
            return "replay" if self.steps.replays else "trace"

        self.status = StepStatus(self.backend, kind_of_step, self._flops_of_batch())
        self.add_callback(self.status)

    def keep_record(self, args: TrainingArguments, lines: RunLines) -> None:
        """Keep a record of the runs to come, with the arguments as they were given, and make a report of each."""
        self.add_callback(
            RunRecord(
                self.backend,
                lambda: self.describe_run(args, lines.facts),
                self.status,
                lambda: self.watch.events_of_run,
                lambda: lines.spent,
                lambda: self.steps.why_traced if self.backend.static_shapes else None,
                self.sync_monitor.describe,
                lambda: self.preemption.reason,
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
        # A teacher or a reference takes part of the time.
        if not isinstance(model, PreTrainedModel) or self._runs_other_passes:
            return None
        parameters, num_trained = count_parameters(self.model)
        return cache(partial(step_flops, model.config, adapters=num_trained if num_trained < parameters else None))

    def _take_train_metrics(self, grad_norm: torch.Tensor | float | None = None) -> dict[str, float]:
        """Read the loss, the gradient norm if there is one, and the metrics, all in one transfer, and begin their sums anew."""
        with self.phase("device"), self.copies.unwatched():
            host_values = self.backend.fetch(
                {"grad_norm": grad_norm, "loss": self.loss_log.tensors, "metrics": self.logged_metrics("train")},
                self.begin_read,
            )
        window = self.loss_log.read(host_values["loss"])
        if self.model.training:
            # Where a callback has left the model in evaluation mode, upstream's next log shows the metrics.
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

    # ---- What a run is ----

    def tell_of_rows(self, lines: list[str]) -> None:
        """Say what a dataset has lost by its preparation: when a run starts, or at once of a dataset that an evaluation is given."""
        if "train_dataset" not in vars(self):
            self.adapted.changes += lines
            return
        for line in lines:
            logger.warning(f"{line}.")

    def find_facts(self) -> RunFacts:
        """What the start of a run prints, as the trainer and its datasets are by now."""
        args, backend, adapted = self.args, self.backend, self.adapted
        others = names_of_packed(self.model).union(*(frozen.names for frozen in self.frozen[:1]))
        dtypes = {
            dtype_name(parameter.dtype)
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and name not in others
        }
        quantization = find_config(self.model)
        if quantization is not None:
            dtypes.add(quantization.quantization_method())
        # On the CPU, accelerate leaves float16 out.
        in_float16 = args.fp16 and self.accelerator.native_amp
        compute = "bfloat16" if adapted.compute_dtype or args.bf16 else "float16" if in_float16 else None
        precision = f"{'/'.join(sorted(dtypes))} weights" + (f", {compute} compute" if compute else "")
        lines = self.chips.lines(self.model, self.averaging.average is not None)
        lines += [*self.describe_frozen(), *self.averaging.lines(self.state.max_steps)]
        lines += adapted.changes
        if args.fp16 and not in_float16:
            lines.append(f"fp16=True has no effect on {backend.name}: upstream computes in float16 on a GPU alone")
        lines += [*self._few_rows(), *self._rounded_updates()]
        facts = RunFacts(precision, self._train_batch_size, [], None, lines)
        rows = self.train_dataset
        columns = known_columns(rows)
        facts.pairs = any(name.startswith("rejected") for name in columns)
        if backend.static_shapes and self.lengths:
            facts.lengths = self.step_lengths
            # Other columns hold several sequences of an example, as a pair does.
            if self._train_lengths is not None and "input_ids" in columns:
                waste = TokenWaste(
                    self._train_lengths,
                    self.lengths,
                    self._train_batch_size,
                    args.train_sampling_strategy,
                    packing=vars(args).get("packing"),
                    token_share=share_of_tokens(rows),
                    accumulates=args.gradient_accumulation_steps > 1,
                )
                facts.lengths = list(waste.pad_share_per_length)
                facts.token_share = 1 - waste.pad_share
                if self.tells_padding:
                    facts.token_waste = waste.describe()
                    buckets = vars(args).get("length_buckets")
                    if buckets and len(buckets) > 1 and (advice := waste.describe_unused(buckets)) is not None:
                        lines.append(advice)
            facts.programs = len(facts.lengths) * (2 if args.gradient_accumulation_steps > 1 else 1)
            facts.programs *= 2 if self.some_without_images else 1
        return facts

    def describe_frozen(self) -> list[str]:
        """A line on the memory of frozen weights, if they take less."""
        num_bytes = sum(frozen.num_bytes for frozen in self.frozen)
        if not num_bytes:
            return []
        whole = format_bytes(2 * num_bytes)
        return [f"frozen weights in bfloat16 (exact): {format_bytes(num_bytes)} of HBM instead of {whole}"]

    def _rounded_updates(self) -> list[str]:
        """A line for each dtype where weights are trained in so few bits that small updates are lost, on every device and upstream, too."""
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.requires_grad}
        is_quantized = find_config(self.model) is not None
        fix = "TRL casts adapters of quantized models to it" if is_quantized else "dtype=float32 avoids that"
        return [
            f"trained weights are {dtype_name(dtype)}: {lost}. {fix}"
            for dtype, lost in _FEW_BITS.items()
            if dtype in dtypes
        ]

    def _few_rows(self) -> list[str]:
        """A line where an optimizer step has more rows than there are. Trainers that generate repeat their prompts."""
        rows, total = self.train_dataset, self.get_total_train_batch_size(self.args)
        if self.generates or not isinstance(rows, Sized) or len(rows) >= total:
            return []
        return [
            f"train_dataset has {count(len(rows), 'row')}, fewer than the global batch size of {total}: each step has only these. Lower "
            "per_device_train_batch_size or gradient_accumulation_steps"
        ]

    def describe_run(self, args: TrainingArguments, facts: RunFacts | None) -> dict[str, Any]:
        """What the record of a run says of it, as JSON: the arguments as they were given, the facts as it began."""
        model, backend, config = unwrap_peft_model(self.model), self.backend, args.to_dict()
        of_model, datasets = _settings_of_adapter(self.model), named_datasets(vars(self))
        own_code = self.describe_own_code()
        if (quantization := find_config(self.model)) is not None:
            of_model["quantization_config"] = str(quantization.quantization_method())
        parameters, num_trained = count_parameters(self.model)
        return {
            "versions": find_versions(),
            "arguments": config | of_model | own_code,
            "changed": sorted([*of_model, *own_code, *(name for name in _changed_fields(args) if name in config)]),
            "model": {
                # A model that was made of a config has no name.
                "name": (isinstance(model, PreTrainedModel) and model.config.name_or_path) or type(model).__name__,
                "parameters": parameters,
                "trained": num_trained,
            },
            "datasets": {
                name: dataset.info.dataset_name for name, dataset in datasets.items() if isinstance(dataset, Dataset)
            },
            "rows": {name: len(dataset) for name, dataset in datasets.items() if isinstance(dataset, Sized)},
            "backend": {
                "name": backend.name,
                "device": backend.device_name,
                "reason": backend.reason,
                "chips": backend.num_chips * self.args.world_size,
                "hosts": backend.processes.hosts,
                "processes": max(self.args.world_size, backend.processes.count),
                "memory_per_chip": backend.memory_per_chip,
            },
            "facts": asdict(self.find_facts() if facts is None else facts),
        }

    # ---- Upstream's hooks ----

    def set_initial_training_values(self, args, dataloader):
        if has_length(dataloader) and len(dataloader) == 0:
            rows = f" of {count(len(self.train_dataset), 'row')}" if isinstance(self.train_dataset, Sized) else ""
            fix = "Check its rows and its sampler."
            if args.dataloader_drop_last:
                fix = "Set dataloader_drop_last=False, or lower per_device_train_batch_size."
            raise UserError(
                f"There is no batch to train on: a train_dataset{rows} does not fill a batch of "
                f"{args.train_batch_size * args.world_size}. {fix}"
            )
        return super().set_initial_training_values(args, dataloader)

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
        with self.phase("data"), self.copies.unwatched():
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
    ) -> None:
        with self.agreement.deciding(self.state.global_step, lambda: self.control):
            logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
            reading, self._logs_together = nullcontext(), logs
            if logs and self.backend.metrics_on_device:
                # Upstream's own log reads the loss, the gradient norm and every metric one by one. Afterwards it logs nothing more, since
                # this step counts as logged.
                logged = self._take_train_metrics(grad_norm)
                logged["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
                self._globalstep_last_logged = self.state.global_step
                self.store_flos()
                self.log(logged, start_time)
            elif logs and self.status is not None:
                with self.phase("device"):
                    self.backend.wait()
                # Upstream reads what it logs in here.
                reading = self.phase("read")
            with reading:
                super()._maybe_log_save_evaluate(
                    tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
                )

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.backend.metrics_on_device:
            self._take_train_metrics()
            self._tr_loss = torch.zeros(())
        return super()._finalize_training(trial, num_train_samples, start_time)

    def log(self, logs, start_time=None) -> None:
        tensors = {name: value for name, value in logs.items() if isinstance(value, torch.Tensor)}
        if tensors:
            # A number of the user's own loss: a checkpoint cannot hold it as a tensor.
            logs.update({name: value.tolist() for name, value in self.backend.fetch(tensors).items()})
        measurements = {}
        if self.status is not None:
            # A process may log by itself, in a callback or a loss of the user's: speed is counted over all processes.
            is_of_all, self._logs_together = self._logs_together, False
            measurements = self.status.take_speed() if "loss" in logs and is_of_all else {}
            measurements |= self.status.take_phases() if "train_runtime" in logs else {}
        all_logs, history = {**logs, **measurements}, self.state.log_history
        before = len(history)
        pending = self.is_in_train and self.state.global_step > self._globalstep_last_logged
        if pending and self.model.training and self.backend.metrics_on_device:
            # Called by a callback: upstream shows the metrics so far, and begins anew.
            with self.copies.unwatched():
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


def find_versions() -> dict[str, str]:
    """Versions of Python, this package and those that it builds on."""
    versions = {name: version(name) for name in _PACKAGES if find_spec(name) is not None}
    return {"python": python_version(), "hf_tpu_ext": __version__, **versions}


def _changed_fields(settings: TrainingArguments | PeftConfig) -> list[str]:
    """Names of the fields whose value a person has set: it is not the one that they have when they are left out."""
    names = []
    for field in fields(settings):
        value = vars(settings)[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        # Upstream makes the last two of what was left out, too.
        if value == default or value == [] or isinstance(value, AcceleratorConfig):
            continue
        if field.name not in _LEFT_OUT or value != _LEFT_OUT[field.name](settings):
            names.append(field.name)
    return names


def _settings_of_adapter(model: nn.Module) -> dict[str, Any]:
    """
    What a person has set of the adapter that is trained, as `peft_config.lora_dropout`, and its rank and `lora_alpha`, also the
    defaults; nothing without one.
    """
    if not isinstance(model, PeftModel):
        return {}
    config = model.peft_config[model.active_adapter]
    # AdaLoRA begins with another one than `r`.
    rank = "init_r" if "init_r" in vars(config) else "r"
    names = {rank, "lora_alpha", *_changed_fields(config)}.difference(_OF_THE_MODEL)
    values = {name: value for name, value in vars(config).items() if name in names}
    return {
        f"peft_config.{name}": sorted(value) if isinstance(value, set) else value for name, value in values.items()
    }
