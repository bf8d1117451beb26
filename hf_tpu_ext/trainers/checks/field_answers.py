"""The answers that the table of fields gives, and what they do to arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any, Literal

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from ...backends.base import Backend
from ...errors import UserError
from ...sharding import resolve_mesh


def split_by(args: TrainingArguments) -> str | None:
    """By what accelerate splits over processes what is trained: one of the names in [`Place`]."""
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        return None
    if args.deepspeed_plugin is not None:
        return "deepspeed stage 3" if args.deepspeed_plugin.zero_stage == 3 else "deepspeed"
    return "fsdp" if args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP") else None


@dataclass(frozen=True)
class Place:
    """
    Where a run is to be: what an answer depends on besides the value of a field.

    Args:
        name (`str`): Name of the backend.
        static_shapes (`bool`): Whether it is a device that compiles, to which upstream's arguments are adapted.
        traces_steps (`bool`): Whether a step is one traced program (torch_xla), or not (torch_tpu).
        chips (`int`): Chips of this process.
        processes (`int`): Processes that train together with torch_tpu.
        splits_weights (`bool`): Whether each of these holds parts of the weights.
        split_by (`str`, *optional*): What upstream splits training by: `"fsdp"`, `"deepspeed"` or `"deepspeed stage 3"`.
        runs_gpu_kernels (`bool`): Whether kernels that are written for GPUs run here.
    """

    name: str = "xla"
    static_shapes: bool = True
    traces_steps: bool = True
    chips: int = 1
    processes: int = 1
    splits_weights: bool = False
    split_by: str | None = None
    runs_gpu_kernels: bool = False

    @classmethod
    def of(cls, backend: Backend, args: TrainingArguments) -> "Place":
        """The place that a backend is for some arguments."""
        xla, chips = backend.static_shapes, backend.num_chips
        processes = backend.processes.row_shards if xla else 1
        splits = processes > 1 and resolve_mesh(vars(args).get("mesh"), processes * chips)["fsdp"] > 1
        return cls(
            backend.name, xla, backend.traces_steps, chips, processes, splits, split_by(args), backend.runs_gpu_kernels
        )


@dataclass
class AdaptedArguments:
    """
    Arguments as a device takes them: a changed copy of the caller's, with one line in `changes` for each setting that was
    replaced or has no effect.

    A `compute_dtype` of `None` is that of the weights. The others are as in [`ExtensionArguments`].
    """

    args: TrainingArguments
    compute_dtype: torch.dtype | None = None
    changes: list[str] = field(default_factory=list)
    mesh: str | None = None
    step_replay: bool | None = None
    rematerialization: str = "none"
    scan_layers: str = "auto"
    attention: str = "auto"


@dataclass(frozen=True)
class Run:
    """
    A run that is to be: `trainer_kwargs` are the other arguments of its trainer, by name, `loads_model` is whether it loads the
    model by its name, or a reference, with `model_init_kwargs`, and `overrides_loss` whether the loss is of the user's own code.
    """

    adapted: AdaptedArguments
    place: Place
    trainer_kwargs: Mapping[str, Any]
    loads_model: bool
    overrides_loss: bool

    @property
    def args(self) -> TrainingArguments:
        """The arguments, as the rows before have changed them."""
        return self.adapted.args

    def __getitem__(self, name: str) -> Any:
        """The value of a field, or of an argument of the trainer; `None` where there is no such thing."""
        return vars(self.args).get(name, self.trainer_kwargs.get(name))


#: In place of a value that fields are set to.
UNCHANGED = object()


@cache
def default_of(cls: type[TrainingArguments], name: str) -> Any:
    """Upstream's default of a field, or this package's of its own, and `None` of what is no field."""
    owners = [owner for owner in cls.__mro__ if name in vars(owner).get("__dataclass_fields__", {})]
    of_upstream = [owner for owner in owners if owner.__module__.startswith(("transformers.", "trl."))]
    owner = next(iter(of_upstream or owners), None)
    return None if owner is None else owner.__dataclass_fields__[name].default


def is_changed(name: str, value: Any, run: Run) -> bool:
    """Whether a value is another than upstream's default."""
    return value is not None and value != default_of(type(run.args), name)


@dataclass(frozen=True)
class Row:
    """
    What becomes of some fields.

    Args:
        answer (`str`): One of four.
        names (`str`): Fields of one answer, or arguments of a trainer, separated by spaces.
        says (`str`): A sentence without its subject, which is the field. Of those that work, what they are about.
        beside (`str`): Fields that say nothing without the others, and become `None` with them.
        values (`str`): In words, which values the row is about.
        when (`Callable`, *optional*): Takes a value and the [`Run`]: whether it is one of them. Default: [`is_changed`].
        where (`Callable`): Takes the [`Place`]: whether the row is about it.
        adapt (`Callable`, *optional*): Changes the arguments of the [`Run`] in place of the row, and says so itself.
        becomes (`Any`): What the fields are set to, for upstream's code not to act on them. Default: they stay as they are.
        follows (`bool`): Whether a value that changes after the trainer was made is taken up by the next run.
    """

    answer: Literal["works", "replaced", "no effect", "refused"]
    names: str
    says: str
    beside: str = ""
    values: str = ""
    when: Callable[[Any, Run], bool] | None = None
    where: Callable[[Place], bool] = lambda place: place.static_shapes
    adapt: Callable[[Run], None] | None = None
    becomes: Any = UNCHANGED
    follows: bool = False

    def apply(self, run: Run) -> None:
        """
        Check the arguments of a run, change them, and say so in a line.

        Raises:
            `ValueError`: A value is refused. The message says what to set instead.
        """
        names = [name for name in self.names.split() if name in vars(run.args) or name in run.trainer_kwargs]
        if not names or not self.where(run.place) or (self.answer == "works" and not self.adapt):
            return
        if self.adapt is not None:
            self.adapt(run)
            return
        for name in names:
            value = run[name]
            if not (self.when(value, run) if self.when else is_changed(name, value, run)):
                continue
            plain_value = value.value if isinstance(value, Enum) else value
            on = "" if run.place.static_shapes else f" on {run.place.name}"
            says = self.says.format(name=name, args=run.args, by=run.place.split_by, on=on)
            if self.answer == "refused":
                raise UserError(f"{f'{name}={plain_value!r}' if name in vars(run.args) else name} {says}")
            run.adapted.changes.append(f"{name if value is True else f'{name}={plain_value}'} {says}")
        if self.becomes is not UNCHANGED:
            vars(run.args).update(dict.fromkeys(names, self.becomes) | dict.fromkeys(self.beside.split()))


def at(where: Callable[[Place], bool], *rows: Row) -> tuple[Row, ...]:
    """Rows that are about other places than devices that compile."""
    return tuple(replace(row, where=where) for row in rows)


def works(about: str, names: str, *, follows: bool = True, adapt: Callable[[Run], None] | None = None) -> Row:
    """Fields that do what they do upstream."""
    return Row("works", names, about, follows=follows, adapt=adapt)


def replacement(names: str, by: str, **more: Any) -> Row:
    """Fields in whose place something else does what they ask for."""
    return Row("replaced", names, f"is replaced by {by}", **more)


def without_effect(names: str, why: str, **more: Any) -> Row:
    """Fields that change nothing."""
    return Row("no effect", names, f"has no effect{{on}}: {why}", **more)


def refusal(names: str, says: str, **more: Any) -> Row:
    """Fields with values that cannot be. The sentence says what to set instead."""
    return Row("refused", names, says, **more)
