"""What a program depends on besides its tensors: it guards each run of the program."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .python_state import PythonState


class StepFingerprint:
    """
    What programs of some models depend on besides tensors: all that Python may read in them, and settings.

    Args:
        models (`Sequence[torch.nn.Module]`):
            The model that a program trains or evaluates, then those that it runs beside it.
        note (`Callable[[list[torch.Tensor]], PythonState]`):
            Notes what Python may read, besides the values of the tensors that it is given.
        settings (`Callable[[], Any]`):
            What else programs depend on, to be compared.
        why_not (`Callable[[], str | None]`):
            Says, after a change, why code has to run at each step, as half a sentence.
        training (`bool`):
            Whether the model is in training.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        note: Callable[[list[Tensor]], PythonState],
        settings: Callable[[], Any],
        why_not: Callable[[], str | None],
        training: bool,
    ):
        self._models, self._note, self._settings, self._training = models, note, settings, training
        self.why_not = why_not
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

    def change(self) -> str | None:
        """What has changed since it was noted, as half a sentence."""
        change = self._python_state.change()
        if change is not None:
            # Upstream does so at each step, and it may undo the change.
            self._models[0].train(self._training)
            change = self._python_state.change()
        if change is None and self._settings() != self._noted:
            change = "the optimizer, its settings or the callbacks have changed"
        return change
