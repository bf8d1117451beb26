"""The batches of an evaluation: traced, or replayed by the handle of their program."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...backends.compiled_function import CompiledFunction
from ...layers.random_numbers import RandomNumbers
from ...step.metrics import DeviceSums
from ...temporarily import temporarily
from .programs import SentBatch
from .user_code import METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP


#: What the watch calls the program of a batch whose loss is added up, and of one whose predictions are kept.
EVALUATION_STEP, PREDICTION_STEP = "evaluation step", "prediction step"


class EvaluationSteps:
    """
    Runs the batches of an evaluation, or of a prediction.

    They are compiled as training steps are. What is here besides is that upstream calls for a batch at a time: several evaluations
    share their programs, until training begins or ends, and one has its model only at its first batch.
    """

    def __init__(self, trainer):
        self._trainer, self._backend, self._programs = trainer, trainer.backend, trainer.programs
        self._compiled: CompiledFunction | None = None
        self._sums: DeviceSums | None = None
        self._preprocess: Callable | None = None
        self._under_way = False
        self._begin_at_batch: Callable[[], None] | None = None
        # Batches since the last micro-step of training, each of which draws other random numbers.
        self._number = 0
        # What computes the batch under way.
        self._trace: Callable[..., Any] | None = None
        #: Numbers that the batch under way has on the device, besides its own.
        self.data: dict[str, torch.Tensor] | None = None

    def under_way(
        self, model: nn.Module, sums: DeviceSums | None = None, preprocess: Callable | None = None
    ) -> AbstractContextManager[None]:
        """
        Context of an evaluation of a model, whose losses are added to `sums`, or whose predictions are kept: what code of the
        user's, `preprocess`, makes of them.
        """
        # At the first batch, when upstream has prepared the model.
        self._begin_at_batch = partial(self._begin, model, sums, preprocess)
        self._number = 0
        return temporarily(self, _under_way=True)

    def _begin(self, model: nn.Module, sums: DeviceSums | None, preprocess: Callable | None) -> None:
        self._begin_at_batch = None
        models = [model, *self._trainer.other_models()]
        self._sums, self._preprocess = sums, preprocess
        if self._programs.step_replay is False:
            return
        why_not = partial(self._why_not_replay, models)
        if (reason := why_not()) is not None:
            self._compiled = None
            self._programs.warn_traced(reason, training=False)
        elif self._compiled is None:
            self._compiled = self._programs.compile(
                self._run_batch,
                models,
                METHODS_OF_A_PREDICTION,
                state=self._tensors,
                why_not=why_not,
                settings=self._settings,
            )

    def forget(self) -> None:
        """Forget what was compiled. A run makes other tensors of the weights."""
        self._compiled = None

    def run(self, kind: str, inputs: dict[str, Any], trace: Callable, **data: Any) -> Any:
        """
        Run a batch, and return what `trace(inputs, **data)` makes of it. In `data` are numbers of it on the host, which are
        sent, and other values, which are part of the program.
        """
        trainer = self._trainer
        if self._under_way and self._begin_at_batch is not None:
            self._begin_at_batch()
        what = "evaluation" if kind == EVALUATION_STEP else "prediction"
        run_traced = partial(self._programs.end, kind, f"{what} after step {self._programs.steps_done}")
        if self._compiled is None or not self._under_way:
            # A user may also call upstream's `prediction_step`, with the model as it is.
            result = trace(inputs, **self._backend.send(data))
            run_traced()
            return result
        self._number += 1
        self._trace = trace
        with trainer.copies.not_made():
            device_data = trainer.send_batch(inputs, {**data, "seed": trainer.seeds.beside(self._number)})
            return self._compiled(
                {**device_data, "of_evaluation": trainer.data_of_evaluation()}, run_traced, kind=kind
            )

    def _run_batch(self, data: dict[str, dict[Any, Any]], kind: str) -> Any:
        """What is compiled."""
        numbers = dict(data["numbers"])
        with RandomNumbers(numbers.pop("seed")), temporarily(self, data=data["of_evaluation"]):
            return self._trace(SentBatch(data["batch"]), **numbers)

    # ---- What is compiled ----

    def _why_not_replay(self, models: list[nn.Module]) -> str | None:
        if self._preprocess is not None and self._programs.step_replay is not True:
            return "preprocess_logits_for_metrics is user code; step_replay=True if it does the same at every step"
        return self._programs.why_traced(models, METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP)

    def _settings(self) -> dict[str, Any]:
        return {
            "preprocess_logits_for_metrics": self._preprocess,
            "how the trainer computes": self._trainer.settings_of_programs(),
        }

    def _tensors(self) -> list[torch.Tensor]:
        """What a batch reads and changes, besides the model; always in the same order."""
        sums = [] if self._sums is None else self._sums.tensors.values()
        return [*sums, *self._trainer.metric_tensors["eval"].values()]
