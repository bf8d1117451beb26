"""Arguments that are changed after the trainer was made."""

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.utils import logging

from ..configs import ExtensionArguments
from .field_answers import AdaptedArguments
from .fields import FIELDS


logger = logging.get_logger(__name__)

# TRL's trainers read their own fields when they are made.
_FOLLOWED = {name for row in FIELDS if row.follows for name in row.names.split()} & {
    field.name for field in fields(Seq2SeqTrainingArguments)
}
_OWN = {field.name for field in fields(ExtensionArguments)}
# A resumed run keeps the rows of its checkpoint.
_OF_A_CHECKPOINT = {"per_device_train_batch_size", "generation_batch_size", "steps_per_generation"}


def _values(args: TrainingArguments) -> dict[str, Any]:
    return {field.name: copy(vars(args)[field.name]) for field in fields(args) if field.name in vars(args)}


class FollowedArguments:
    """
    Takes up what is changed in the caller's arguments after the trainer was made.

    Upstream's trainers keep the caller's object. Here a copy is adapted to the device. The caller's object is adapted anew when
    training, an evaluation or a prediction begins, and what has changed in it is brought over.

    `adapted` is what they became when the trainer was made, and `adapt` adapts them as they were adapted then. With
    `follows_upstream`, upstream reads its own fields when it needs them, since nothing is prepared by them. `recipe_rows` are the
    recipe's rows of a chip and micro-steps.
    """

    def __init__(
        self,
        callers: TrainingArguments,
        adapted: AdaptedArguments,
        adapt: Callable[[TrainingArguments], AdaptedArguments],
        follows_upstream: bool,
        recipe_rows: list[int],
    ):
        self._callers, self._own, self._adapt, self._recipe_rows = callers, adapted.args, adapt, recipe_rows
        self._follows = lambda name: name not in _OWN if follows_upstream else name in _FOLLOWED
        self._snapshots = _values(callers), _values(adapted.args)
        self._lines = set(adapted.changes)

    def take_up(self) -> None:
        """
        Bring over what was changed in the caller's arguments, and name what comes too late.

        Raises:
            `ValueError`: A new value is refused. The message says what to set instead.
        """
        changes, own = (
            {name: value for name, value in _values(args).items() if name in earlier and earlier[name] != value}
            for args, earlier in zip((self._callers, self._own), self._snapshots, strict=True)
        )
        lines: list[str] = []
        if changes:
            arguments = self._adapt(self._callers)
            lines = [line for line in arguments.changes if line not in self._lines]
            for name in filter(self._follows, changes):
                setattr(self._own, name, vars(arguments.args)[name])
            if "gradient_accumulation_steps" in changes:
                self._recipe_rows[1] = changes["gradient_accumulation_steps"]
        self._snapshots = _values(self._callers), _values(self._own)
        self._lines.update(lines)
        for line in lines:
            logger.warning(f"{line}.")
        named_in_lines = {line.partition(" ")[0].partition("=")[0] for line in lines} | _OF_A_CHECKPOINT - set(changes)
        late = [
            f"{name}={value!r}"
            for name, value in (own | changes).items()
            if name not in named_in_lines and not self._follows(name)
        ]
        if late:
            logger.warning(
                f"{', '.join(late)}: changed after the trainer was made, which has no effect. Make another trainer with it."
            )
