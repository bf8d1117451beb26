"""Where a trainer tells its phases, and what its logs show of them."""

from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, asdict, fields
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from platform import python_version
from typing import Any

from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import unwrap_peft_model

from .. import __version__
from ..callbacks.program_watch import ProgramEvent
from ..callbacks.run_lines import RunLines
from ..callbacks.run_record import RunRecord
from ..callbacks.step_status import StepStatus
from ..step.estimate import count_parameters, read_dimensions, step_flops
from .dataset_checks import named_datasets


_PACKAGES = ("torch", "torch_xla", "transformers", "trl", "accelerate", "peft", "datasets")


class StatusMixin:
    """The part of [`TPUTrainerMixin`] that times the phases of steps and puts them into logs, see [`StepStatus`]."""

    #: What times the steps, or `None` with `step_status=False`.
    status: StepStatus | None = None

    def start_status(self, wanted: bool) -> None:
        """
        Time the steps of the runs to come, if that is wanted.

        Args:
            wanted (`bool`):
                As `step_status` in [`ExtensionArguments`].
        """
        if wanted:
            self.status = StepStatus(self.backend, self._kind_of_step, self._flops_of_batch())
            self.add_callback(self.status)

    def keep_record(self, args: TrainingArguments, lines: RunLines) -> None:
        """
        Keep a record of the runs to come, and have a report made of each.

        Args:
            args ([`~transformers.TrainingArguments`]):
                Arguments as they were given.
            lines ([`RunLines`]):
                What finds out about the run when it begins.
        """
        describe = partial(self._describe_run, args, lines)
        self.add_callback(RunRecord(self.backend, describe, self.status, self._compiled_programs))

    def _compiled_programs(self) -> Sequence[ProgramEvent]:
        return self.watch.events if self.backend.traces_steps else ()

    def _describe_run(self, args: TrainingArguments, lines: RunLines) -> dict[str, Any]:
        """What the record of a run says of it, as JSON."""
        model, config = unwrap_peft_model(self.model), args.to_dict()
        parameters, trained = count_parameters(self.model)
        return {
            "versions": find_versions(),
            "arguments": config,
            "changed": sorted(name for name in changed_arguments(args) if name in config),
            "model": {
                "name": model.config.name_or_path if isinstance(model, PreTrainedModel) else type(model).__name__,
                "parameters": parameters,
                "trained": trained,
            },
            "rows": {
                name: len(dataset)
                for name, dataset in named_datasets(self.train_dataset, self.eval_dataset).items()
                if isinstance(dataset, Sized)
            },
            "backend": {
                "name": self.backend.name,
                "device": self.backend.device_name,
                "reason": self.backend.reason,
                "chips": self.backend.num_chips,
                "memory_per_chip": self.backend.memory_per_chip,
            },
            "facts": asdict(self._run_facts() if lines.facts is None else lines.facts),
        }

    def phase(self, name: str) -> AbstractContextManager:
        """
        Context that is a phase of a step.

        Args:
            name (`str`):
                Its name in logs, after `phase/`.
        """
        return nullcontext() if self.status is None else self.status.clock.phase(name)

    def begin_read(self) -> None:
        """Count the rest of the phase under way as one that reads from the device."""
        if self.status is not None:
            self.status.clock.enter("read")

    def _kind_of_step(self) -> str:
        if not self.backend.traces_steps:
            return "step"
        return "replay" if self.steps.replays else "trace"

    def _flops_of_batch(self) -> Callable[[tuple[int, int]], float | None] | None:
        """What counts the arithmetic of a batch of a shape, where this model can be counted."""
        model = unwrap_peft_model(self.model)
        dimensions = read_dimensions(model.config) if isinstance(model, PreTrainedModel) else None
        if dimensions is None:
            return None
        parameters, trained = count_parameters(self.model)
        return cache(partial(step_flops, dimensions, adapters=trained if trained < parameters else None))

    # ---- Upstream's hooks ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.status is not None:
            self.status.end_step()
        with self.phase("data"):
            return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if self.backend.metrics_on_device or not logs:
            super()._maybe_log_save_evaluate(*args, **kwargs)
            return
        # Upstream reads what it logs in here.
        if self.status is not None:
            with self.phase("device"):
                self.backend.wait()
        with self.phase("read"):
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs, start_time=None) -> None:
        if self.status is not None and "loss" in logs:
            logs.update(self.status.take())
        with self.phase("log"):
            super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        with self.phase("eval"):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _save_checkpoint(self, model, trial) -> None:
        with self.phase("save"):
            super()._save_checkpoint(model, trial)


def find_versions() -> dict[str, str]:
    """The versions that a run depends on, by name."""
    found = {name: version(name) for name in _PACKAGES if find_spec(name) is not None}
    return {"python": python_version(), "hf_tpu_ext": __version__, **found}


def changed_arguments(args: TrainingArguments) -> list[str]:
    """
    List what a person has set.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Arguments.

    Returns:
        `list[str]`: Names of the fields whose value is not the default.
    """
    changed = []
    for field in fields(args):
        value = vars(args)[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        # Upstream makes these two of what was left out.
        if value != default and value != [] and not isinstance(value, AcceleratorConfig):
            changed.append(field.name)
    return changed
