"""What a trainer tells about its steps to those who watch for recompiles and reads."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...backends.folded_numbers import describe_number
from ...backends.insight import SourceLine
from ...callbacks.program_watch import ProgramWatch
from ...callbacks.recompile_cause import BatchEntry, ParameterFacts, StepFacts
from ...callbacks.recompile_monitor import RecompileMonitor
from ...callbacks.source_lines import describe_line, package_of
from ...formatting import dtype_name
from ...step.module_settings import settings_of
from ...step.optimizer import LazyAdamW
from ...step.running_code import is_known
from .own_code import names_of_a_step


class TrainerWatch:
    """
    Has the programs of a trainer counted, timed and, where one is compiled again, explained. It is made before the
    data collator is wrapped. `max_recompiles` is as in [`ExtensionArguments`].
    """

    def __init__(self, trainer, max_recompiles: int | None):
        self._trainer = trainer
        self._callers_collator = trainer.data_collator
        #: The batch under way, on the host, and its shape.
        self.batch: Mapping[str, Any] = {}
        self.batch_shape: tuple[int, ...] = ()
        # The optimizer's state and numbers before the step under way: the schedule has changed them when it ends.
        self._optimizer_before: tuple[bool, list[dict[str, Any]]] = False, []
        #: Counts and explains the programs.
        self.programs = ProgramWatch(
            trainer.backend,
            quiet=trainer.args.disable_tqdm or trainer.backend.ranks.index > 0,
            find_facts=self._step_facts,
            find_results=self._step_results,
            max_recompiles=max_recompiles,
        )
        #: Names what reads the device between logs.
        self.monitor = RecompileMonitor(trainer.backend, self.programs)
        trainer.add_callback(self.monitor)

    def begin(self) -> None:
        """Watch a run whose optimizer, and what replays its steps, are there."""
        self._note_optimizer()
        self.programs.begin(traced=self._trainer.steps.compiled is None)

    def end(self) -> None:
        """Stop watching a run, however it ended."""
        self.monitor.close()

    def note_batch(self, inputs: Mapping[str, Any]) -> None:
        """Note the batch under way, on the host."""
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.batch = inputs
        if self._trainer.model.training and self.programs.step is not None:
            # Now: a callback may have set them since the last step.
            self._note_optimizer()
        # Other columns may come first.
        self.batch_shape = tuple(tensors.get("input_ids", next(iter(tensors.values()))).shape)

    def end_program(
        self,
        kind: str,
        where: str,
        run: Callable[[], Any] | None = None,
        shape: tuple[int, ...] | None = None,
        settle: bool = False,
    ) -> Any:
        """
        End the program recorded so far, and note what it depends on if it is compiled. Messages name what it does and
        its place in the run. `run`, by default [`Backend.end_step`], compiles and starts it; what it gives is
        returned. `shape` is that of its tokens, by default that of the batch under way; `settle` is as in
        [`ProgramWatch.end`].
        """
        known = len(self.programs.events)
        shape = self.batch_shape if shape is None else shape
        program = self.programs.end(kind, shape, where, run, settle)
        status = self._trainer.status
        if status is not None:
            for event in self.programs.events[known:]:
                if (event.kind, event.shape) == (kind, shape):
                    status.clock.credit("compile", event.seconds)
        return program

    def _note_optimizer(self) -> None:
        optimizer = self._trainer._plain_optimizer
        self._optimizer_before = bool(optimizer.state), [dict(group) for group in optimizer.param_groups]

    def _own_code(self) -> str:
        """Code of the user's that runs within a step."""
        for owner in type(self._trainer).__mro__:
            if not is_known(owner.__module__):
                for name in sorted(names_of_a_step(type(self._trainer)) & vars(owner).keys()):
                    return _describe_code(vars(owner)[name])
        return "compute_loss_func" if self._trainer.compute_loss_func is not None else ""

    # ---- What a program depends on ----

    def _step_results(self) -> list[torch.Tensor]:
        if not self._trainer.model.training:
            return []
        parameters = list(self._trainer.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*self._trainer.loss_log.tensors.values(), *parameters, *gradients]

    def _step_facts(self) -> StepFacts:
        settings = {f"args.{name}": repr(value) for name, value in settings_of(self._trainer.args).items()}
        for path, module in self._trainer.model.named_modules():
            settings |= {f"{path}.{name}".lstrip("."): repr(value) for name, value in settings_of(module).items()}
        trains = self._trainer.model.training and self._trainer.optimizer is not None
        state_made, groups = self._optimizer_before if trains else (True, [])
        return StepFacts(
            batch={key: _entry(value) for key, value in self.batch.items()},
            batch_source=_source_of(self._callers_collator),
            parameters={
                name: ParameterFacts(parameter.requires_grad, dtype_name(parameter.dtype), str(tuple(parameter.shape)))
                for name, parameter in self._trainer.model.named_parameters()
            },
            settings=settings,
            optimizer=type(self._trainer._plain_optimizer).__name__ if trains else "",
            numbers=_numbers_of(groups, isinstance(self._trainer._plain_optimizer, LazyAdamW)) if trains else {},
            state_made=state_made,
            own_code=self._own_code(),
            change=None if self._trainer.steps.compiled is None else self._trainer.steps.compiled.change,
        )


def _describe_code(code: Callable) -> str:
    """Name and line of a function or a class; the name alone where it was written in a shell, or in a known package."""
    name = code.__qualname__.rpartition("<locals>.")[2]
    try:
        line = SourceLine(inspect.getsourcefile(code), inspect.getsourcelines(code)[1])
    except (OSError, TypeError):
        return name
    return name if package_of(line.file) else f"{name}, {describe_line(line)}"


def _entry(value: Any) -> BatchEntry:
    if isinstance(value, torch.Tensor):
        return BatchEntry(dtype_name(value.dtype), str(tuple(value.shape)))
    return BatchEntry("", repr(value))


def _source_of(collator: Callable) -> str:
    while isinstance(collator, partial):
        collator = collator.func
    code = collator if inspect.isroutine(collator) else type(collator)
    return _describe_code(code)


def _numbers_of(groups: list[dict[str, Any]], are_sent: bool) -> dict[str, str]:
    numbers = {}
    for index, group in enumerate(groups):
        for name, value in group.items():
            label = name if len(groups) == 1 else f"{name} of group {index}"
            if are_sent and name in ("lr", "weight_decay", "initial_lr"):
                # Sent as data; without weight decay, the step has no such operation.
                value = ("not 0" if value else "0") if name == "weight_decay" else None
            elif isinstance(value, float):
                value = describe_number(value)
            if name not in ("params", "initial_lr") and value is not None:
                numbers[label] = value if isinstance(value, str) else repr(value)
    return numbers
