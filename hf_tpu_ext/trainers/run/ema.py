"""The average of the weights (EMA) of a run: begun, kept up at each step, used by evaluations, saved and resumed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.utils import logging

from ...backends.base import Backend
from ...backends.streamed import StreamedTensor, in_file_order, read_all, save_safetensors
from ...errors import UserError
from ...layers.layer_scan import LayerStack
from ...step.ema import WeightAverage, in_place_of_weights
from ...step.optimizer import LazyAdamW
from ..checkpoint.saved_model import EMA_FILE, UPDATES
from ..configs import ExtensionArguments
from .layers import LayerScan


logger = logging.get_logger(__name__)

# Share of the weights of the beginning in the last average, from which on it is worth a line.
_MUCH_OF_THE_FIRST = 0.1


class Averaging(TrainerCallback):
    """
    Keeps the average that `ema_decay` asks for, see [`WeightAverage`]; without it, does nothing.

    [`LazyAdamW`] updates it in its own program. With another optimizer it is updated by a hook after the optimizer's step:
    on XLA within the same program, on CUDA and CPU eagerly. It is a callback where steps run eagerly; elsewhere
    [`TrainingSteps`] begins it, when the layers run as they will. `layers` says which parameters are those of several layers,
    `find_optimizer` finds the optimizer of the run, which a callback may replace, and `settings` are the caller's arguments, or
    their class for the defaults.
    """

    def __init__(
        self,
        backend: Backend,
        layers: LayerScan,
        find_optimizer: Callable[[], torch.optim.Optimizer],
        settings: ExtensionArguments | type[ExtensionArguments],
    ):
        self._backend, self._layers, self._find_optimizer = backend, layers, find_optimizer
        #: The checkpoint that the run resumes from.
        self.resumed_from: str | None = None
        self._evaluates = settings.ema_eval
        #: The average, or `None`.
        self.average: WeightAverage | None = None
        if settings.ema_decay is not None:
            self.average = WeightAverage(settings.ema_decay, settings.ema_warmup)
        # Names of the parameters of single layers, also while these run as one loop.
        self._names: dict[nn.Parameter, str] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._hook = None

    def note_names(self, model: nn.Module) -> None:
        """Note the names of parameters, before layers run as one loop."""
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    # ---- A run ----

    def begin(self) -> None:
        """Begin the average of a run whose weights and optimizer are as its first step finds them."""
        if self.average is None:
            return
        self._attach()
        if self.resumed_from is not None and not self._load(Path(self.resumed_from)):
            logger.warning(
                f"{self.resumed_from} is resumed without an average of its weights, since it has no {EMA_FILE}: ema_decay "
                "averages from here on."
            )
            self.average.restart()
            self._attach()

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin()

    def on_step_begin(self, args, state, control, **kwargs):
        self.follow_optimizer()

    def follow_optimizer(self) -> None:
        """Go on with an optimizer that a callback has put in the place of the run's own."""
        if self.average is not None and self._find_optimizer() is not self._optimizer:
            self._attach()

    def _attach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._optimizer = optimizer = self._find_optimizer()
        self.average.follow(parameter for group in optimizer.param_groups for parameter in group["params"])
        if isinstance(optimizer, LazyAdamW):
            optimizer.average = self.average
        else:
            self._hook = optimizer.register_step_post_hook(self._update)

    def split(self, stack: LayerStack) -> None:
        """Go on with the parameters of single layers, which do not run as one loop any more."""
        for parameter in stack.tensors.values():
            if parameter in self.tensors:
                self.average.split(parameter, stack.parts_of(parameter))

    def _update(self, *_) -> None:
        backend, decay = self._backend, self.average.next_decay()
        if backend.traces_steps:
            self.average.update(backend.send(torch.tensor(1 - decay, dtype=torch.float32)))
        else:
            self.average.update_eagerly(decay)

    @property
    def tensors(self) -> dict[nn.Parameter, Tensor]:
        """The averages by the parameters that they follow, in the order of the optimizer."""
        return {} if self.average is None else self.average.values

    def lines(self, steps: int) -> list[str]:
        """What a person is told about the average at the start of a run of so many steps, or 0 where that is not known."""
        average = self.average
        if average is None:
            return []
        warmup = ", with warm-up" if average.warmup else ""
        lines = [f"EMA of the trained weights: decay {average.decay:g}{warmup}"]
        share = average.decay**steps
        if steps and not average.warmup and share > _MUCH_OF_THE_FIRST:
            lines.append(
                f"ema_decay={average.decay:g} over {steps} steps leaves the weights of the beginning {share:.0%} of the average; "
                "ema_warmup=True or a lower decay leaves them less"
            )
        return lines

    # ---- Evaluation ----

    def in_evaluation(self) -> AbstractContextManager:
        """Context of an evaluation, which is of the average if `ema_eval` says so."""
        return in_place_of_weights(self._of_model()) if self._evaluates else nullcontext()

    def _of_model(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters that the model has now, each with its average."""
        layers = self._layers
        for parameter, value in self.tensors.items():
            parts = layers.parts_of(parameter)
            if parts is None or layers.is_stacked:
                yield parameter, value
            else:
                yield from zip(parts, value.unbind(), strict=True)

    # ---- Files ----

    def _in_file(self) -> dict[str, Tensor | StreamedTensor]:
        """What is to be saved, by name and in the order in which it is read."""
        tensors = {}
        for parameter, value in zip(self.tensors, self._backend.stream([*self.tensors.values()]), strict=True):
            parts = self._layers.parts_of(parameter)
            if parts is None:
                tensors[self._names[parameter]] = value
            else:
                tensors |= {self._names[part]: value[index] for index, part in enumerate(parts)}
        return in_file_order(tensors)

    def read(self) -> None:
        """Take part in the reads of another host, which saves the average."""
        if self.tensors:
            read_all(self._in_file())

    def save(self, directory: str) -> None:
        """Write the average beside a model that is saved."""
        if self.tensors:
            updates = {UPDATES: str(self.average.updates)}
            save_safetensors(self._in_file(), Path(directory) / EMA_FILE, updates)

    def load_best(self, checkpoint: str) -> None:
        """Take the average of a checkpoint whose weights were loaded at the end of a run."""
        if self.tensors and not self._load(Path(checkpoint)):
            logger.warning(f"{checkpoint} has no {EMA_FILE}: its weights are loaded, and there is no average of them.")
            self.average.restart()

    def _load(self, checkpoint: Path) -> bool:
        path = checkpoint / EMA_FILE
        if not path.is_file():
            return False
        average = self.average
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            for parameter in average.values:
                parts = self._layers.parts_of(parameter)
                names_of_parts = [self._names[part] for part in ([parameter] if parts is None else parts)]
                if absent := sorted(set(names_of_parts) - names):
                    raise UserError(
                        f"{path} has no average of {absent[0]}, which this run trains. Train the same parameters as before, or "
                        "leave ema_decay out."
                    )
                # These share the memory of the file.
                values_of_parts = [file.get_tensor(name) for name in names_of_parts]
                whole = values_of_parts[0] if parts is None else torch.stack(values_of_parts)
                whole = whole.to(torch.promote_types(parameter.dtype, torch.float32))
                average.values[parameter] = self._backend.place_as(whole, parameter)
            average.updates = int(file.metadata()[UPDATES])
        return True
