"""The layers of a model, compiled one by one where a step cannot be compiled whole."""

from collections.abc import Callable

from torch import nn
from transformers.utils import logging

from ...backends.base import Backend
from ...layers.layer_list import find_layers


logger = logging.get_logger(__name__)


class CompiledLayers:
    """Compiles the layers of a model for a run, each as a program of its own; the rest of a step is run by operators."""

    def __init__(self, backend: Backend):
        self._backend = backend
        #: What leaves each layer that is compiled now as it was.
        self.undo: list[Callable[[], None]] = []

    def begin(self, model: nn.Module, reason: str) -> None:
        """Compile the layers, if there are any, and say why no more is compiled: `reason` is a clause."""
        layers = find_layers(model)
        if layers is not None and not self.undo:
            parent, name = layers
            self.undo = [self._backend.compile_module(layer) for layer in getattr(parent, name)]
        logger.warning(
            f"The {len(self.undo)} layers are compiled one by one, and the rest is run by operators: {reason}."
            if self.undo
            else f"Steps are run by operators: {reason}, and the model has no list of layers."
        )

    def end(self) -> None:
        """Leave the layers as they were."""
        for undo in self.undo:
            undo()
        self.undo = []
