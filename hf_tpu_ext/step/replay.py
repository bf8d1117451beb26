"""Steps that are traced twice, and from then on run by their compiled program's handle."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers.utils import logging

from ..backends.base import Backend
from ..backends.program import CannotReplay, Program, RealCopies, Recording
from .python_state import PythonState, host_random_state


logger = logging.get_logger(__name__)

# Steps that have to be recorded anew this often are better traced.
_MOST_CHANGES = 8

# The place of a tensor in what a step has made.
_TENSOR = object()

#: The micro-step with the optimizer's update, and those before it that only add to the gradients.
OPTIMIZER_STEP, MICRO_STEP = "training step", "micro-step"
#: What is appended to the kind of a program beside the steps where that of an evaluation is another one.
OF_EVALUATION = " of an evaluation"


def warn_not_replayed(reason: str, training: bool = True) -> None:
    """Say that steps are not replayed, or batches of an evaluation, and why, as half a sentence."""
    what = "Step replay is off, every step" if training else "Replay of evaluation is off, every batch"
    logger.warning(f"{what} is traced: {reason}. step_replay=False silences this line.")


@dataclass
class _Recorded:
    program: Program
    updates: Sequence[Any]
    compiles: int
    #: What the step makes besides the state, with `_TENSOR` in the place of tensors.
    made: Any = None
    checked: bool = False


class StepReplay:
    """
    Runs micro-steps and optimizer steps by the handle of their compiled program, with the current tensors.

    The first step of a kind and shape is traced and recorded. The second is traced too, and compared: the same program,
    over the same tensors, with the same constants; if it is not, so is the third. After that nothing is traced: the host sends the batch and the
    learning rate, and hands over one handle. Where anything that Python could have read in the step has changed, it is recorded
    anew. Where that cannot be known, or where a step cannot be recorded, it is traced as without replay.

    Args:
        backend ([`Backend`]):
            The backend in use.
        models (`Sequence[torch.nn.Module]`):
            The model that is trained, then those that it is trained with.
        state (`Callable[[], list[torch.Tensor]]`):
            The tensors that a step reads and changes besides those of the models and their gradients, always in the same order.
        note (`Callable[[list[torch.Tensor]], PythonState]`):
            Notes what Python may read in a step, besides the values of the tensors that it is given.
        settings (`Callable[[], Any]`):
            What else programs depend on, to be compared.
        why_not (`Callable[[], str | None]`):
            Says, after a change, why steps cannot be replayed any more, as half a sentence.
        copies ([`~hf_tpu_ext.backends.program.RealCopies`]):
            Context that is entered. It is left from the beginning of each step to its end.
        assume_pure (`bool`, *optional*, defaults to `False`):
            Whether random numbers that are drawn on the host within a step do not matter.
        training (`bool`, *optional*, defaults to `True`):
            Whether steps train the model. Otherwise they evaluate it.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[nn.Module],
        state: Callable[[], list[torch.Tensor]],
        note: Callable[[list[torch.Tensor]], PythonState],
        settings: Callable[[], Any],
        why_not: Callable[[], str | None],
        copies: RealCopies,
        assume_pure: bool = False,
        training: bool = True,
    ):
        self._backend = backend
        self._models = models
        self._more_state = state
        self._note = note
        self._settings = settings
        self._why_not = why_not
        self._assume_pure = assume_pure
        self._training = training
        self._copies = copies
        self._aliased: set[int] = set()
        self._changes = 0
        self.refused: str | None = None
        self.replays = False
        self.grad_norm = backend.send(torch.zeros(()))
        models[0].train(training)
        self._forget()

    def _forget(self) -> None:
        self._tensors = [
            *dict.fromkeys(tensor for model in self._models for tensor in (*model.parameters(), *model.buffers()))
        ]
        self._parameters = [tensor for tensor in self._tensors if isinstance(tensor, nn.Parameter)]
        self._python_state = self._note(self._tensors)
        self._programs: dict[Hashable, _Recorded] = {}
        # Those whose second recording was not like the first.
        self._unlike: set[Hashable] = set()
        self._noted = self._settings()

    def _state(self) -> list[torch.Tensor]:
        parameters = self._parameters if self._training else ()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*self._tensors, *gradients, *self._more_state(), self.grad_norm]

    def refuse(self, reason: str) -> None:
        """Trace every step from now on. The reason is half a sentence."""
        if self.refused is None:
            warn_not_replayed(reason, self._training)
        self.refused = reason
        self._programs.clear()

    # ---- One micro-step or optimizer step ----

    def begin(self, kind: str, data: dict[str, Any]) -> bool:
        """
        Begin a `"micro-step"`, a `"training step"` or the like, and say whether it is to be traced. Otherwise nothing is,
        and `end` runs it. In `data` is what differs from step to step, tensors on the device. Other values there are part
        of the program.
        """
        self._copies.suspend()
        self._backend.flush()
        self._data = [value for value in data.values() if isinstance(value, torch.Tensor)]
        self._recording: Recording | None = None
        self.replays = False
        if self.refused is not None:
            return True
        change = self._python_state.change()
        if change is not None:
            # Upstream does so at each step, and it may undo the change.
            self._models[0].train(self._training)
            change = self._python_state.change()
        if change is None and self._settings() != self._noted:
            change = "the optimizer, its settings or the callbacks have changed"
        change = self._agree("the beginning of a step", change)
        if change is not None and not self._note_change(change):
            return True
        self._key = (
            kind,
            tuple(
                (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name, _fixed(value))
                for name, value in data.items()
            ),
        )
        recorded = self._programs.get(self._key)
        if recorded is not None and recorded.checked and self._backend.programs.keeps(recorded.compiles):
            self.replays = True
            return False
        refused = None
        try:
            self._recording = self._backend.programs.record(self._state())
        except CannotReplay as reason:
            refused = str(reason)
        refused = self._agree("the recording of a step", refused)
        if refused is not None:
            self._recording = None
            self.refuse(refused)
        else:
            self._recording.add_data(self._data)
            self._before = host_random_state(), self._backend.counters()
        return True

    def _agree(self, what: str, reason: str | None) -> str | None:
        """What this host has found out, or another one: they trace and replay together."""
        return next((found for found in self._backend.hosts.exchange(what, reason) if found is not None), None)

    def _note_change(self, change: str) -> bool:
        self._changes += 1
        reason = self._why_not()
        if reason is None and self._changes > _MOST_CHANGES:
            reason = f"{change}, and there were {_MOST_CHANGES} such changes before"
        if reason is not None:
            self.refuse(reason)
            return False
        if self._programs:
            # Where that compiles another program, the watch says so.
            logger.info(f"The step is traced again: {change}.")
        self._forget()
        return True

    @property
    def updates(self) -> Sequence[Any]:
        """What the optimizer updates in the step that is replayed."""
        return self._programs[self._key].updates

    def end(
        self,
        run_traced: Callable[..., Program | None],
        updates: Sequence[Any] = (),
        sent: torch.Tensor | None = None,
        made: Any = None,
    ) -> Any:
        """
        Run the step: what was traced, or what was recorded before.

        `run_traced(run=...)` runs what was traced, and tells those who watch. `updates` is what the optimizer has
        updated in the traced step, for it to find again, and `sent` the numbers that it has sent to the device for
        this step. `made` is what the trace has made besides the state, with tensors in it; returned is what this step has
        made.
        """
        if sent is not None:
            self._data.append(sent)
            if self._recording is not None:
                self._recording.add_data([sent])
        if self.replays:
            recorded = self._programs[self._key]
            tensors = iter(recorded.program.run(self._state(), self._data, self._find_aliased()))
            made = tree_map(lambda leaf: next(tensors) if leaf is _TENSOR else leaf, recorded.made)
            recorded.compiles = self._backend.compiles()
        elif self._recording is None:
            run_traced(run=self._backend.end_step)
        else:
            self._run_recorded(run_traced, updates, made)
            # The step has run code that may keep some.
            self._copies.seen = True
        self._copies.resume()
        return made

    def _find_aliased(self) -> set[int]:
        """Tensors of the state that somebody has a view of. Asked anew only where there may be more or fewer."""
        if self._aliased or self._copies.seen:
            self._aliased, self._copies.seen = self._backend.programs.aliased(self._state()), False
        return self._aliased

    def _run_recorded(self, run_traced: Callable[..., Program | None], updates: Sequence[Any], made: Any) -> None:
        before = self._programs.get(self._key)
        recording, self._recording = self._recording, None
        unlike = self._agree("the end of a recorded step", self._why_unlike())
        if unlike is not None:
            self.refuse(unlike)
            run_traced(run=self._backend.end_step)
            return
        try:
            recording.add_results([leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)])
            finish = partial(recording.finish, self._state(), self._find_aliased())
            program = run_traced(run=finish)
        except CannotReplay as reason:
            self.refuse(str(reason))
            run_traced(run=self._backend.end_step)
            return
        form = tree_map_only(torch.Tensor, lambda tensor: _TENSOR, made)
        difference = None
        if before is not None:
            difference = program.difference(before.program)
            if before.updates != updates:
                difference = "the step updates other parameters than before"
            if before.made != form:
                difference = "the step makes other results than before"
        difference = self._agree("the comparison of a step", difference)
        if difference is not None and self._key in self._unlike:
            self.refuse(difference)
            return
        if difference is not None:
            # The first step of a run may be another program, which does the same with one operator less.
            self._unlike.add(self._key)
        checked = before is not None and difference is None
        self._programs[self._key] = _Recorded(program, updates, self._backend.compiles(), form, checked)

    def _why_unlike(self) -> str | None:
        """What the trace did that a replayed step would not do."""
        random_state, before = self._before
        spent = self._backend.counters() - before
        if spent.fallbacks:
            return "CPU fallback of an operator in the step"
        if spent.reads:
            return "a device-to-host sync in the step, whose value may decide what runs next"
        if not self._assume_pure and host_random_state() != random_state:
            return "a step draws random numbers on the host (random, numpy.random or torch); step_replay=True if they do not matter"
        return None


def _fixed(value: Any) -> Hashable:
    """A value that is part of a program, to be compared."""
    return (value.shape, value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else repr(value)
