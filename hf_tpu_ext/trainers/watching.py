"""What a trainer tells about its steps to those who watch for recompiles and reads."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..backends.folded_numbers import describe_number
from ..backends.insight import SourceLine
from ..backends.program import Program
from ..callbacks.program_watch import ProgramWatch
from ..callbacks.recompile_cause import BatchEntry, ParameterFacts, StepFacts
from ..callbacks.recompile_monitor import RecompileMonitor
from ..callbacks.source_lines import describe_line, package_of
from ..step.module_settings import settings_of
from ..step.optimizer import LazyAdamW
from .own_code import is_known, names_of_a_step


class WatchMixin:
    """
    The part of [`TPUTrainerMixin`] that has its programs counted, timed and, where one is compiled again, explained.
    """

    #: Counts and explains the programs of the run, where programs are compiled.
    watch: ProgramWatch
    #: Names what reads the device between logs, where programs are compiled.
    monitor: RecompileMonitor | None = None
    _max_recompiles: int | None = None

    def start_watch(self) -> None:
        """Watch programs from now on, before the data collator is wrapped."""
        self._callers_collator = self.data_collator
        # The batch under way, on the host.
        self._batch: Mapping[str, Any] = {}
        self._batch_shape: tuple[int, ...] = ()
        # The optimizer's state and numbers before the step under way: the schedule has changed them when it ends.
        self._optimizer_before: tuple[bool, dict[str, str]] = False, {}
        self.watch = ProgramWatch(
            self.backend,
            quiet=self.args.disable_tqdm,
            find_facts=self._step_facts,
            find_results=self._step_results,
            max_recompiles=self._max_recompiles,
        )
        self.monitor = RecompileMonitor(self.backend, self.watch)
        self.add_callback(self.monitor)

    def begin_watch(self) -> None:
        """Watch a run whose optimizer, and what replays its steps, are there."""
        self._note_optimizer()
        self.watch.begin(traced=self.replay is None)

    def end_watch(self) -> None:
        """Stop watching a run, however it ended."""
        if self.monitor is not None:
            self.monitor.close()

    def _note_batch(self, inputs: Mapping[str, Any]) -> None:
        tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        self._batch = inputs
        if self.model.training and self.watch.step is not None:
            # Now: a callback may have set them since the last step.
            self._note_optimizer()
        # Other columns may come first.
        self._batch_shape = tuple(tensors.get("input_ids", next(iter(tensors.values()))).shape)

    def end_program(self, kind: str, where: str, run: Callable[[], Program | None] | None = None) -> Program | None:
        """
        End the program recorded so far, and note what it depends on if it is compiled.

        Args:
            kind (`str`):
                What it does.
            where (`str`):
                Place in the run.
            run (`Callable[[], Program | None]`, *optional*):
                Compiles and starts it, by default [`Backend.end_step`].

        Returns:
            [`Program`] or `None`: What `run` returned.
        """
        known = len(self.watch.events)
        program = self.watch.end(kind, self._batch_shape, where, run)
        if self.status is not None:
            for event in self.watch.events[known:]:
                if (event.kind, event.shape) == (kind, self._batch_shape):
                    self.status.clock.credit("compile", event.seconds)
        return program

    def _note_optimizer(self) -> None:
        optimizer = self._plain_optimizer
        self._optimizer_before = bool(optimizer.state), _numbers_of(optimizer)

    def _own_code(self) -> str:
        """Code of the user's that runs within a step."""
        for owner in type(self).__mro__:
            if not is_known(owner.__module__):
                for name in sorted(names_of_a_step(type(self)) & vars(owner).keys()):
                    return _describe_code(vars(owner)[name])
        return "compute_loss_func" if self.compute_loss_func is not None else ""

    # ---- What a program depends on ----

    def _step_results(self) -> list[torch.Tensor]:
        if not self.model.training:
            return []
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*self.loss_log.tensors.values(), *parameters, *gradients]

    def _step_facts(self) -> StepFacts:
        settings = {f"args.{name}": repr(value) for name, value in settings_of(self.args).items()}
        for path, module in self.model.named_modules():
            settings |= {f"{path}.{name}".lstrip("."): repr(value) for name, value in settings_of(module).items()}
        state_made, numbers = self._optimizer_before if self.model.training else (True, {})
        return StepFacts(
            batch={key: _entry(value) for key, value in self._batch.items()},
            batch_source=_source_of(self._callers_collator),
            parameters={
                name: ParameterFacts(parameter.requires_grad, _name_of(parameter.dtype), str(tuple(parameter.shape)))
                for name, parameter in self.model.named_parameters()
            },
            settings=settings,
            optimizer=type(self._plain_optimizer).__name__ if self.model.training else "",
            numbers=numbers,
            state_made=state_made,
            own_code=self._own_code(),
        )


def _describe_code(code: Callable) -> str:
    """Name and line of a function or a class; the name alone where it was written in a shell, or in a known package."""
    name = code.__qualname__.rpartition("<locals>.")[2]
    try:
        line = SourceLine(inspect.getsourcefile(code), inspect.getsourcelines(code)[1])
    except (OSError, TypeError):
        return name
    return name if package_of(line.file) else f"{name}, {describe_line(line)}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _entry(value: Any) -> BatchEntry:
    if isinstance(value, torch.Tensor):
        return BatchEntry(_name_of(value.dtype), str(tuple(value.shape)))
    return BatchEntry("", repr(value))


def _source_of(collator: Callable) -> str:
    while isinstance(collator, partial):
        collator = collator.func
    code = collator if inspect.isroutine(collator) else type(collator)
    return _describe_code(code)


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    numbers = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            label = name if len(optimizer.param_groups) == 1 else f"{name} of group {index}"
            if isinstance(optimizer, LazyAdamW) and name in ("lr", "weight_decay", "initial_lr"):
                # Sent as data; without weight decay, the step has no such operation.
                value = ("not 0" if value else "0") if name == "weight_decay" else None
            elif isinstance(value, float):
                value = describe_number(value)
            if name not in ("params", "initial_lr") and value is not None:
                numbers[label] = value if isinstance(value, str) else repr(value)
    return numbers
