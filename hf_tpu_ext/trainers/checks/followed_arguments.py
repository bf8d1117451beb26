"""Arguments that are changed after the trainer was made."""

from copy import copy
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from ..configs import ExtensionArguments


logger = logging.get_logger(__name__)

#: What the model, the data and the device are prepared by when a trainer is made, on top of what only subclasses of
#: [`~transformers.TrainingArguments`] have.
_FIXED = {
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "bf16",
    "bf16_full_eval",
    "dataloader_pin_memory",
    "deepspeed",
    "enable_jit_checkpoint",
    "fp16",
    "fp16_full_eval",
    "fsdp",
    "fsdp_config",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "label_smoothing_factor",
    "logging_nan_inf_filter",
    "neftune_noise_alpha",
    "optim",
    "per_device_train_batch_size",
    "report_to",
    "torch_compile",
    "torch_empty_cache_steps",
    "use_cpu",
    "use_liger_kernel",
}


class _Noted:
    """Notes what arguments are, to find what was changed since."""

    def __init__(self, args: TrainingArguments):
        self._args = args
        self._values: dict[str, Any] = {}
        self.changes()

    def changes(self) -> dict[str, Any]:
        """What has changed since the last time, with its present value."""
        values, before = vars(self._args), self._values
        self._values = {field.name: copy(values[field.name]) for field in fields(self._args) if field.name in values}
        return {name: value for name, value in self._values.items() if name in before and before[name] != value}


class FollowedArguments:
    """
    Takes up what is changed in the caller's arguments after the trainer was made.

    Upstream's trainers keep the caller's object. Here a copy is adapted to the device, so a change in the caller's object is
    brought over when training, an evaluation or a prediction begins.
    """

    def __init__(self, trainer, args: TrainingArguments):
        self._trainer = trainer
        self._callers, self._own = _Noted(args), _Noted(trainer.args)

    def take_up(self) -> None:
        """Bring over what was changed in the caller's arguments, and name what comes too late."""
        args, unknown_upstream = self._trainer.args, self._trainer.backend.unknown_upstream
        own = self._own.changes()
        # A resumed run keeps the rows of its checkpoint.
        for name in ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation"):
            own.pop(name, None)
        fixed = {field.name for field in fields(ExtensionArguments)}
        if unknown_upstream:
            fixed |= _FIXED | {field.name for field in fields(args)} - {
                field.name for field in fields(TrainingArguments)
            }
        changed = self._callers.changes()
        for name, value in changed.items():
            if name not in fixed:
                setattr(args, name, value)
            if name == "gradient_accumulation_steps":
                self._trainer.chips.recipe_rows[1] = value
        self._own.changes()
        late = {name: value for name, value in {**own, **changed}.items() if name in fixed}
        if late:
            settings = ", ".join(f"{name}={value!r}" for name, value in late.items())
            logger.warning(
                f"{settings}: changed after the trainer was made, which has no effect. Make another trainer with it."
            )
