"""What a program depends on besides its tensors: it guards each run of the program."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction
from .python_state import PythonState
from .running_code import RunningCode


class StepFingerprint:
    """
    What programs of some models depend on besides tensors: all that Python may read in them, and settings.

    Args:
        models (`Sequence[torch.nn.Module]`):
            The model that a program trains or evaluates, then those that it runs beside it.
        note (`Callable[[list[torch.Tensor]], PythonState]`):
            Notes what Python may read, besides the values of the tensors that it is given.
        settings (`Callable[[], dict[str, Any]]`):
            What else programs depend on, to be compared, by the names that people are shown.
        why_not (`Callable[[], str | None]`):
            Says, after a change, why code has to run at each step, as a clause.
        training (`bool`):
            Whether the model is in training.
        trusts_code (`bool`, *optional*, defaults to `False`):
            Whether code of the user's does the same at every step.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        note: Callable[[list[Tensor]], PythonState],
        settings: Callable[[], dict[str, Any]],
        why_not: Callable[[], str | None],
        training: bool,
        trusts_code: bool = False,
    ):
        self._models, self._note, self._settings, self._training = models, note, settings, training
        self.why_not, self._trusts_code = why_not, trusts_code
        #: Code of the user's that ran in a trace, as a clause.
        self.code: str | None = None
        #: The parameters and buffers of the models, as they were noted.
        self.tensors: list[Tensor] = []

    def note(self) -> None:
        """Note everything as it is now."""
        self._models[0].train(self._training)
        self.tensors = [
            *dict.fromkeys(tensor for model in self._models for tensor in (*model.parameters(), *model.buffers()))
        ]
        self._python_state = self._note(self.tensors)
        self._noted = self._settings()

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Context of a trace, in which code of the user's is noted."""
        if self._trusts_code:
            yield
            return
        running = RunningCode()
        with running:
            yield
        if running.found is not None:
            self.code = f"{running.found}; step_replay=True if it does the same at every step"

    def change(self) -> str | None:
        """What has changed since it was noted, as a clause."""
        change = self._python_state.change()
        if change is not None:
            # Upstream does so at each step, and it may undo the change.
            self._models[0].train(self._training)
            change = self._python_state.change()
        if change is None and (now := self._settings()) != self._noted:
            change = " and ".join(name for name, value in now.items() if value != self._noted[name]) + " changed"
        return change


def compile_alone(
    backend: Backend, model: nn.Module, function: Callable[..., Any], state: Callable[[], list[Tensor]] = list
) -> CompiledFunction:
    """Compile a function that depends on a model in evaluation mode and on `state`, outside of a trainer."""
    fingerprint = StepFingerprint(
        [model],
        lambda given: PythonState({"model": model}, {}, {}, given, backend.programs.memory_of),
        settings=dict,
        why_not=lambda: None,
        training=False,
    )
    return backend.programs.compile(function, state, fingerprint, backend.programs.real_copies())
