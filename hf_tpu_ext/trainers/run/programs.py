"""Functions of a trainer that run as compiled programs, what guards these, and copies of the weights that they write."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...backends.base import Backend
from ...backends.compiled_function import CompiledFunction
from ...step.fingerprint import Fingerprint, Reach
from ...temporarily import temporarily
from .user_code import (
    HOOKS_OF_ALL_MODULES,
    METHODS_OF_A_STEP,
    attributes_of_a_step,
    counters_in_own_code,
    draws_other_layers,
    find_own_code,
    namespaces_of_a_step,
)


logger = logging.get_logger(__name__)

_NEVER_COPIES = ("hf_tpu_ext.", "transformers.")


class SentBatch(dict):
    """A batch that is on the device."""


class TrainerPrograms:
    """
    Compiles functions of a trainer, and finds what guards them. What computes beside or within steps has this in place of the
    trainer.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        #: Ends the program that was recorded, see [`WatchMixin.end_program`].
        self.end = trainer.end_program
        #: What is kept until training begins or ends, by what it is for: a run makes other tensors of the weights.
        self.of_run: dict[Hashable, Any] = {}
        # Why something is traced each time, as a line has said.
        self._said: set[str] = set()

    @property
    def step_replay(self) -> bool | None:
        """As in [`ExtensionArguments`]."""
        return self._trainer.adapted.step_replay

    @property
    def steps_done(self) -> int:
        """Optimizer steps of the run that are done."""
        return self._trainer.state.global_step

    def warn_traced(self, reason: str, training: bool = True) -> None:
        """Say that steps are traced each time, or batches of an evaluation where no line has said so yet, and why, as a clause."""
        if training:
            logger.warning(
                f"Step replay is off, every step is traced: {reason}. step_replay=False silences this line."
            )
        elif reason not in self._said:
            logger.warning(f"Replay of evaluation is off, every batch is traced: {reason}.")
        self._said.add(reason)

    def warn_if_traced(self, compiled: CompiledFunction) -> None:
        """Say that what runs beside steps is traced each time, and why, unless that was asked for."""
        if compiled.why_traced is not None and self.step_replay is not False:
            self.warn_traced(compiled.why_traced, training=False)

    def why_traced(self, models: Sequence[nn.Module], *methods: tuple[str, ...]) -> str | None:
        """
        Why each call of a function is to be traced, as a clause: it runs models, the trained one first, and code of the
        trainer's `methods`, or of another list of them.
        """
        if (setting := draws_other_layers(models[0])) is not None:
            return f"{setting} leaves out other layers at every step"
        if self.step_replay is True:
            return None
        for names in methods:
            if (own_code := find_own_code(self._trainer, models, names)) is not None:
                return f"{own_code}; step_replay=True if it does the same at every step"
        return None

    def compile(
        self,
        function: Callable[..., Any],
        models: Sequence[nn.Module],
        methods: tuple[str, ...],
        state: Callable[[], list[torch.Tensor]] = list,
        why_not: Callable[[], str | None] | None = None,
        settings: Callable[[], dict[str, Any]] | None = None,
        training: bool = False,
        on_change: Callable[[], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> CompiledFunction:
        """
        Compile a function of the trainer, see [`~hf_tpu_ext.backends.compiled_function.CompiledFunction`]. It is traced each time where
        `why_not` says so, and with `step_replay=False`; a line that says so is up to the caller.

        Args:
            function (`Callable`): What is compiled.
            models (`Sequence[torch.nn.Module]`): Models that it runs, the first of which is that of the run.
            methods (`tuple[str, ...]`): Methods of the trainer whose code runs in it.
            state (`Callable[[], list[torch.Tensor]]`, *optional*):
                Lists what it reads and writes besides the models, always in the same order. By default nothing.
            why_not (`Callable[[], str | None]`, *optional*):
                Says, now and after a change, why each call is to be traced, as a clause; by default
                [`~TrainerPrograms.why_traced`].
            settings (`Callable[[], dict[str, Any]]`, *optional*):
                What else it depends on, by the names that people are shown; by default how the trainer computes.
            training (`bool`, *optional*, defaults to `False`): Whether it trains the model.
            on_change (`Callable[[], None]`, *optional*):
                Called when something has changed that it depends on, before that is noted.
            warn (`Callable[[str], None]`, *optional*):
                Says why each call is traced, as a clause; by default a line of what runs beside steps,
                [`~TrainerPrograms.warn_traced`].
        """
        trainer, programs = self._trainer, self._trainer.backend.programs
        if why_not is None:
            why_not = partial(self.why_traced, models, methods)

        def find_reach() -> Reach:
            if on_change is not None:
                on_change()
            return reach_of_trainer(trainer, models, methods)

        trusts_code = self.step_replay is True
        fingerprint = Fingerprint(
            find_reach,
            models,
            programs.memory_of,
            settings or (lambda: {"how the trainer computes": trainer.settings_of_programs()}),
            why_not,
            training,
            trusts_code,
        )
        compiled = programs.compile(
            function,
            state,
            fingerprint,
            trainer.copies.context,
            draws_on_host=trusts_code,
            warn=warn or partial(self.warn_traced, training=False),
        )
        compiled.why_traced = "step_replay=False" if self.step_replay is False else why_not()
        if trusts_code and compiled.why_traced is None:
            self._warn_of_counters(methods)
        return compiled

    def _warn_of_counters(self, methods: tuple[str, ...]) -> None:
        for name in counters_in_own_code(self._trainer, methods):
            if name not in self._said:
                self._said.add(name)
                logger.warning(
                    f"Code of yours within a step has the name `{name}`: where it is read, replayed steps keep the value of the traced "
                    "step. Where a number depends on it, have a callback fill a buffer of the model with it, and read that in the step."
                )


def reach_of_trainer(trainer, models: Sequence[nn.Module], methods: tuple[str, ...] = METHODS_OF_A_STEP) -> Reach:
    """What Python may read in `methods` of a trainer, which run models, besides the values of their tensors."""
    roots: dict[str, Any] = {}
    for model in models:
        base = unwrap_peft_model(model)
        if isinstance(base, PreTrainedModel):
            # Each module has it, too.
            roots.setdefault("model.config", base.config)
    roots |= {"model" if index == 0 else f"further model {index}": model for index, model in enumerate(models)}
    roots |= HOOKS_OF_ALL_MODULES
    attributes = {"trainer": (trainer, attributes_of_a_step(trainer, methods))}
    if methods is METHODS_OF_A_STEP:
        hooks = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        attributes["optimizer"] = trainer.plain_optimizer, hooks
    return Reach(roots, attributes, namespaces_of_a_step(trainer, models))


class WeightCopies:
    """Lets user code copy weights as on an eager device, where steps give their buffers to compiled programs."""

    def __init__(self, backend: Backend):
        self._backend = backend
        #: Entered during runs with code of the user's between steps, where programs are compiled.
        self.context = backend.programs.real_copies() if backend.traces_steps else None
        #: Makes a context of code that keeps no copy of a weight and calls thousands of operators: copies are not watched in it.
        self.unwatched: Callable[[], AbstractContextManager] = nullcontext

    @contextmanager
    def real(self, objects: Iterable[object], functions: Iterable[Callable | None]) -> Iterator[None]:
        """
        Context of a run, in which methods of `objects` and `functions` are called. Copies of device tensors that are made in it,
        outside of steps, have memory of their own.
        """
        # Each call of an operator takes longer in it. Trackers and progress bars copy no weights.
        never = all(type(each).__module__.startswith(_NEVER_COPIES) for each in objects) and all(
            function is None for function in functions
        )
        if self.context is None or never:
            yield
            return
        with temporarily(self, unwatched=self.context.suspend), self.context:
            yield

    def separate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give copies of weights and moments that were made before this run memory of their own."""
        if self.context is None:
            return
        moments = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.buffers(), *moments]
        device = self._backend.device.type
        self._backend.programs.separate_copies(
            [value for value in tensors if isinstance(value, Tensor) and value.device.type == device]
        )
        self.context.has_aliases = True
