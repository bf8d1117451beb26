"""What a trainer tells about its steps to those who watch for recompiles and reads."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...backends.compiled_function import describe_batch
from ...backends.insight import SourceLine, describe_number
from ...data.static_shapes import WrappedCollator
from ...step.fingerprint import Fingerprint
from ...step.optimizer import LazyAdamW
from ...step.running_code import is_known
from ...vision.families import PIXELS
from ...watch.compilations import ProgramWatch
from ...watch.recompile_cause import Dependencies
from ...watch.source_lines import describe_line, package_of
from ...watch.syncs import SyncMonitor
from .programs import reach_of_trainer
from .user_code import METHODS_OF_A_PREDICTION, METHODS_OF_A_STEP, names_of_a_step


class WatchMixin:
    """The part of [`TPUTrainerMixin`] that has programs counted, timed and, where one is compiled again, explained."""

    #: Counts and explains the programs of the run; where none is compiled, it has none.
    watch: ProgramWatch
    #: Names what reads the device between logs.
    sync_monitor: SyncMonitor
    #: The batch under way, on the host.
    batch_under_way: Mapping[str, Any] = {}
    # The optimizer's state and numbers before the step that was traced last: the schedule has changed them when it ends.
    _optimizer_before: tuple[bool, list[dict[str, Any]]] = False, []

    def start_watch(self, max_recompiles: int | None) -> None:
        """Watch the runs to come. `max_recompiles` is as in [`ExtensionArguments`]."""
        self.watch = ProgramWatch(
            self.backend,
            quiet=self.backend.processes.index > 0,
            bars=not self.args.disable_tqdm,
            find_dependencies=self._find_dependencies,
            find_batch_source=self._name_collator,
            note_python=self._note_python if self.backend.static_shapes else None,
            find_own_code=self._name_own_code,
            find_callbacks=lambda: self.describe_own_code().get("callbacks", ""),
            find_why_traced=self._find_why_traced,
            find_results=self._results_of_step,
            max_recompiles=max_recompiles,
        )
        self.sync_monitor = SyncMonitor(self.backend, self.watch)
        if self.backend.static_shapes:
            self.add_callback(self.sync_monitor)

    def begin_watch(self) -> None:
        """Watch a run whose optimizer, and what replays its steps, are there."""
        self.watch.begin(is_traced=self.steps.compiled is None)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the batch under way."""
        tensors = {key: value for key, value in self.batch_under_way.items() if isinstance(value, torch.Tensor)}
        # Other columns may come first.
        shape = tuple(tensors.get("input_ids", next(iter(tensors.values()))).shape)
        # A batch without images is another graph, and no recompilation.
        return shape + tuple(tensors[PIXELS].shape[1:2]) if PIXELS in tensors else shape

    def end_program(
        self,
        kind: str,
        where: str,
        execute: Callable[[], Any] | None = None,
        shape: tuple[int, ...] | None = None,
        settle: bool = False,
    ) -> Any:
        """
        End the program recorded so far, and note what it depends on if it is compiled. Messages name what it does and
        its place in the run. `execute`, by default [`Backend.end_step`], compiles and starts it; what it gives is
        returned. `shape` is that of its tokens, by default that of the batch under way; `settle` is as in
        [`ProgramWatch.end`].
        """
        return self.watch.end(kind, self.batch_shape if shape is None else shape, where, execute, settle)

    def note_optimizer(self) -> None:
        """Note the optimizer as the step under way has it."""
        optimizer = self.optimizer.optimizer
        self._optimizer_before = bool(optimizer.state), [dict(group) for group in optimizer.param_groups]

    def _name_own_code(self) -> str:
        """Code of the user's that runs within a step, for "in ..."."""
        for owner in type(self).__mro__:
            if not is_known(owner.__module__):
                for name in sorted(names_of_a_step(type(self)) & vars(owner).keys()):
                    return _describe_code(vars(owner)[name], ", which begins at ")
        if self.compute_loss_func is not None:
            return "compute_loss_func"
        own_code = self.own_code_in_step("train")
        return "" if own_code is None else f"code of yours: {own_code}"

    def _name_collator(self) -> str:
        """The collator that the user gave, or has put in its place since."""
        return _describe_code(self._innermost_collator())

    def _innermost_collator(self) -> Callable:
        collator = self.data_collator
        while isinstance(collator, partial | WrappedCollator):
            collator = collator.func if isinstance(collator, partial) else collator.collator
        return collator

    def describe_own_code(self) -> dict[str, str]:
        """Names and lines of the code that the user gave, by the arguments that take it, besides models."""
        given = {
            "trainer": [self],
            "data_collator": [self._innermost_collator()],
            "callbacks": self.callback_handler.callbacks,
            "compute_loss_func": [self.compute_loss_func],
            "compute_metrics": [self.compute_metrics],
        }
        own = {
            name: [code for code in codes if code is not None and not is_known(_written(code).__module__)]
            for name, codes in given.items()
        }
        return {name: "; ".join(map(_describe_code, codes)) for name, codes in own.items() if codes}

    # ---- What a program depends on ----

    def _results_of_step(self) -> list[torch.Tensor]:
        if not self.model.training:
            return []
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*self.loss_log.tensors.values(), *parameters, *gradients]

    @property
    def _is_training_step(self) -> bool:
        return self.model.training and self.optimizer is not None

    def _find_why_traced(self) -> str | None:
        compiled = self.steps.compiled
        return compiled.why_traced if self._is_training_step and compiled is not None else None

    def _find_dependencies(self) -> Dependencies:
        compiled = self.steps.compiled
        return {
            "batch": describe_batch(self.batch_under_way),
            "optimizer": _describe_optimizer(type(self.plain_optimizer), *self._optimizer_before)
            if self._is_training_step
            else {},
            "change": {"last": None if compiled is None else compiled.change},
        }

    def _note_python(self) -> Callable[[], str | None]:
        models = [self.model, *self.other_models()]
        methods = METHODS_OF_A_STEP if self._is_training_step else METHODS_OF_A_PREDICTION
        reach = reach_of_trainer(self, models, methods)
        fingerprint = Fingerprint(lambda: reach)
        fingerprint.note()
        return fingerprint.change


def _written(code: Any) -> Any:
    """What has the name and the lines of some code: a function or a class."""
    return code if inspect.isroutine(code) or isinstance(code, type) else type(code)


def _describe_code(code: Any, at: str = ", ") -> str:
    """Name and line of a function or a class, with `at` between them; the name alone where it was written in a shell, or in a known package."""
    code = _written(code)
    name = code.__qualname__.rpartition("<locals>.")[2]
    try:
        line = SourceLine(inspect.getsourcefile(code), inspect.getsourcelines(code)[1])
    except (OSError, TypeError):
        return name
    return name if package_of(line.file) else f"{name}{at}{describe_line(line)}"


def _describe_optimizer(
    cls: type[torch.optim.Optimizer], has_state: bool, groups: list[dict[str, Any]]
) -> dict[str, str]:
    """What the program of a step depends on of an optimizer."""
    description = {"class": cls.__name__, "state": "there" if has_state else "missing"}
    are_sent = issubclass(cls, LazyAdamW)
    for index, group in enumerate(groups):
        for name, value in group.items():
            label = name if len(groups) == 1 else f"{name} of group {index}"
            if are_sent and name in ("lr", "weight_decay"):
                # These are sent as data; without weight decay, the step has no such operation.
                value = ("not 0" if value else "0") if name == "weight_decay" else None
            elif isinstance(value, float):
                value = describe_number(value)
            if name not in ("params", "initial_lr") and value is not None:
                description[label] = value if isinstance(value, str) else repr(value)
    return description
