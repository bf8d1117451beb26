"""Passes of a model without gradients, beside the training steps: each kind is a compiled program."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...backends.program import CompiledFunction
from ...layers.random_numbers import RandomNumbers
from .programs import TrainerPrograms, beside_batch, split_data


#: What upstream computes log-probabilities with.
_METHODS_OF_A_PASS = ("_get_per_token_logps_and_entropies",)


class Passes:
    """
    Runs what a trainer computes with models between its training steps, such as the log-probabilities of completions.

    A pass is a program of its own. Of each kind and shape two are traced, and from then on it is run by the handle of its program,
    unless code of the user's runs in it.

    Args:
        programs ([`TrainerPrograms`]):
            Compiles them.
    """

    def __init__(self, programs: TrainerPrograms):
        self._programs = programs
        self._compiled: dict[Hashable, CompiledFunction] = {}
        # What computes the pass under way.
        self._trace: Callable[[dict[str, Tensor]], Any] | None = None

    def forget(self) -> None:
        """Forget what was compiled. A run makes other tensors of the weights."""
        self._compiled.clear()

    def run(
        self,
        kind: str,
        model: nn.Module,
        batch: dict[str, Tensor],
        seed: Tensor,
        trace: Callable[[dict[str, Tensor]], Any],
    ) -> Any:
        """
        Run a pass, and return what `trace(batch)` makes, on the device.

        Args:
            kind (`str`):
                What it is for. Passes of one kind are of one model, whose adapters are the same.
            model (`torch.nn.Module`):
                The model.
            batch (`dict[str, torch.Tensor]`):
                What it is given, on the device.
            seed (`torch.Tensor` of shape `()`, int32):
                What its random numbers follow from, on the device.
            trace (`Callable`):
                Computes it.
        """
        run_traced = partial(self._programs.end, kind, f"step {self._programs.done + 1}")
        key = kind, model.training
        if key not in self._compiled:
            self._compiled[key] = self._compile(model)
        self._trace = trace
        return self._compiled[key]({**batch, **beside_batch({"seed": seed})}, run_traced, kind=kind)

    def _compute(self, data: dict[Hashable, Tensor], kind: str) -> Any:
        """What is compiled."""
        numbers, batch = split_data(data)
        with RandomNumbers(numbers["seed"]):
            return self._trace(batch)

    def _compile(self, model: nn.Module) -> CompiledFunction:
        why_not = partial(self._programs.why_traced, [model], _METHODS_OF_A_PASS)
        # It changes nothing.
        compiled = self._programs.compile(
            self._compute, [model], _METHODS_OF_A_PASS, state=list, why_not=why_not, training=model.training
        )
        # A line has said so of the steps.
        compiled.traced = "step_replay=False" if self._programs.step_replay is False else why_not()
        return compiled
