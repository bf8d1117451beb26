"""Steps that are traced twice, and from then on run by their compiled program's handle."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.program import CannotReplay, Program, RealCopies, Recording
from .module_settings import settings_of


logger = logging.get_logger(__name__)

# Steps that have to be recorded anew this often are better traced.
_MOST_CHANGES = 8

#: The step with the optimizer's update, and those before it that only add to the gradients.
CLOSING, MICRO = "training step", "micro-step"


class TrainingState:
    """
    The tensors of models and what their programs depend on besides, noted once and checked at every step.

    Args:
        models (`Sequence[torch.nn.Module]`):
            The model that is trained, then those that it is trained with.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self._settings = []
        self._places = []
        for module in (module for model in models for module in model.modules()):
            attributes = vars(module)
            # Not those that are `None`: modules put what they keep for later there.
            names = [name for name, value in settings_of(module).items() if value is not None]
            of_settings = itemgetter(*names)
            self._settings.append((attributes, names, of_settings, tuple(map(copy, of_settings(attributes)))))
            for entries in (module._parameters, module._buffers):
                tensors = {name: tensor for name, tensor in entries.items() if tensor is not None}
                if tensors:
                    self._places.append((entries, len(entries), tensors))
        places = [(name, tensor) for _, _, tensors in self._places for name, tensor in tensors.items()]
        # Tied weights stand in several places.
        self.tensors = list({id(tensor): tensor for _, tensor in places}.values())
        self.parameters = [tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter)]
        self._trained = [parameter.requires_grad for parameter in self.parameters]

    def change(self) -> str | None:
        """
        Compare with what was noted.

        Returns:
            `str` or `None`: What has changed, as half a sentence.
        """
        for attributes, names, of_settings, noted in self._settings:
            try:
                settings = of_settings(attributes)
            except KeyError as name:
                return f"a module has no {name} any more"
            if settings != noted:
                changed = [place for place in zip(names, settings, noted, strict=True) if place[1] != place[2]]
                return "{} of a module is {}, and was {}".format(*changed[0])
        for entries, size, tensors in self._places:
            if len(entries) != size:
                return "a parameter or buffer was added or removed"
            for name, tensor in tensors.items():
                if entries.get(name) is not tensor:
                    return f"the parameter or buffer {name} was replaced"
        if [parameter.requires_grad for parameter in self.parameters] != self._trained:
            return "a parameter was frozen or unfrozen"
        return None


def say_refused(reason: str) -> None:
    """
    Say that steps are not replayed.

    Args:
        reason (`str`):
            Why, as half a sentence.
    """
    logger.warning(f"Every step is traced, not replayed: {reason}. step_replay=False leaves this line out.")


@dataclass
class _Recorded:
    program: Program
    updates: Sequence[Any]
    compiles: int
    checked: bool = False


class StepReplay:
    """
    Runs micro-steps and optimizer steps by the handle of their compiled program, with the current tensors.

    The first step of a kind and shape is traced and recorded. The second is traced too, and compared: the same program,
    over the same tensors, with the same constants. From the third on nothing is traced: the host sends the batch and the
    learning rate, and hands over one handle. Where anything that the program depends on has changed, or where a step
    cannot be recorded, it is traced as without replay.

    Args:
        backend ([`Backend`]):
            The backend in use.
        models (`Sequence[torch.nn.Module]`):
            The model that is trained, then those that it is trained with.
        state (`Callable[[], list[torch.Tensor]]`):
            The tensors that a step reads and changes besides those of the models and their gradients, always in the same order.
        zero_gradients (`Callable[[], None]`):
            Zeroes or drops the gradients. Part of the optimizer step's program.
        settings (`Callable[[], Any]`):
            What else programs depend on, to be compared.
        run_traced (`Callable[[str, Callable], Program | None]`):
            Called as `run_traced(kind, run)` to run what was traced, with `run`.
        copies ([`~hf_tpu_ext.backends.program.RealCopies`]):
            Context that is entered. It is left from the beginning of each step to its end.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[nn.Module],
        state: Callable[[], list[torch.Tensor]],
        zero_gradients: Callable[[], None],
        settings: Callable[[], Any],
        run_traced: Callable[[str, Callable], Program | None],
        copies: RealCopies,
    ):
        self._backend = backend
        self._models = models
        self._more_state = state
        self._zero_gradients = zero_gradients
        self._settings = settings
        self._run_traced = run_traced
        self._copies = copies
        self._aliased: set[int] = set()
        self._changes = 0
        self.refused: str | None = None
        self.replays = False
        self.grad_norm = backend.send(torch.zeros(()))
        models[0].train()
        self._forget()

    def _forget(self) -> None:
        self._training_state = TrainingState(self._models)
        self._programs: dict[Hashable, _Recorded] = {}
        self._noted = self._settings()

    def _state(self) -> list[torch.Tensor]:
        state = self._training_state
        gradients = [parameter.grad for parameter in state.parameters if parameter.grad is not None]
        return [*state.tensors, *gradients, *self._more_state(), self.grad_norm]

    def refuse(self, reason: str) -> None:
        """
        Trace every step from now on.

        Args:
            reason (`str`):
                Why, as half a sentence.
        """
        if self.refused is None:
            say_refused(reason)
        self.refused = reason
        self._programs.clear()

    # ---- One micro-step or optimizer step ----

    def enter_training_mode(self) -> None:
        """Put every module of the trained model in training mode, as upstream does at each step."""
        if not self._models[0].training:
            self._models[0].train()

    def begin(self, kind: str, data: dict[str, Any]) -> bool:
        """
        Begin a step.

        Args:
            kind (`str`):
                `"micro-step"` or `"training step"`.
            data (`dict[str, Any]`):
                What differs from step to step: tensors on the device. Other values are part of the program.

        Returns:
            `bool`: Whether the step is to be traced. Otherwise nothing is, and `end` runs it.
        """
        self._copies.suspend()
        self._backend.flush()
        self._kind = kind
        self._data = [value for value in data.values() if isinstance(value, torch.Tensor)]
        self._recording: Recording | None = None
        self.replays = False
        if self.refused is not None:
            return True
        change = self._training_state.change()
        if change is not None:
            # Upstream does so at each step, and it may undo the change.
            self._models[0].train()
            change = self._training_state.change()
        if change is None and self._settings() != self._noted:
            change = "the optimizer or a setting is another"
        if change is not None and not self._note_change(change):
            return True
        self._key = (
            kind,
            tuple(
                (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name, repr(value))
                for name, value in data.items()
            ),
        )
        recorded = self._programs.get(self._key)
        if recorded is not None and recorded.checked and self._backend.keeps_program(recorded.compiles):
            self.replays = True
            return False
        try:
            self._recording = self._backend.record(self._state())
        except CannotReplay as reason:
            self.refuse(str(reason))
        else:
            self._recording.add_data(self._data)
        return True

    def _note_change(self, change: str) -> bool:
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            self.refuse(f"{change}, and there were {_MOST_CHANGES} such changes before")
            return False
        if self._programs:
            # Where that compiles another program, the watch says so.
            logger.info(f"Steps are recorded anew: {change}.")
        self._forget()
        return True

    @property
    def updates(self) -> Sequence[Any]:
        """What `end` was told when the step that is replayed was recorded."""
        return self._programs[self._key].updates

    def add_data(self, data: torch.Tensor) -> None:
        """
        Name a further tensor that differs from step to step.

        Args:
            data (`torch.Tensor`):
                Device tensor that the trace has not used yet.
        """
        self._data.append(data)
        if self._recording is not None:
            self._recording.add_data([data])

    def end(self, updates: Sequence[Any] = ()) -> None:
        """
        Run the step: what was traced, or what was recorded before.

        Args:
            updates (`Sequence`, *optional*):
                What the optimizer updates in the traced step, for it to find again in `updates`.
        """
        if not self.replays and self._kind == CLOSING:
            self._zero_gradients()
        if self.replays:
            recorded = self._programs[self._key]
            recorded.program.run(self._state(), self._data, self._find_aliased())
            recorded.compiles = self._backend.compiles()
        elif self._recording is None:
            self._run_traced(self._kind, self._backend.end_step)
        else:
            self._run_recorded(updates)
            # The step has run code that may keep some.
            self._copies.seen = True
        self._copies.resume()

    def _find_aliased(self) -> set[int]:
        """Tensors of the state that somebody has a view of. Asked anew only where there may be more or fewer."""
        if self._aliased or self._copies.seen:
            self._aliased, self._copies.seen = self._backend.aliased(self._state()), False
        return self._aliased

    def _run_recorded(self, updates: Sequence[Any]) -> None:
        before = self._programs.get(self._key)
        like = None if before is None else before.program
        recording, self._recording = self._recording, None
        try:
            finish = partial(recording.finish, self._state(), like, self._find_aliased())
            program = self._run_traced(self._kind, finish)
        except CannotReplay as reason:
            self.refuse(str(reason))
            self._run_traced(self._kind, self._backend.end_step)
            return
        difference = None
        if before is not None:
            difference = program.difference(before.program)
            if before.updates != updates:
                difference = "the step updates other parameters than before"
        if difference is not None:
            self.refuse(difference)
            return
        self._programs[self._key] = _Recorded(program, updates, self._backend.compiles(), checked=before is not None)
