"""Code of the user's that runs within a training step, and what upstream's code reads of a trainer there."""

import ast
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import unwrap_peft_model
from trl import RichProgressCallback

from ...step.fingerprint import HOOKS
from ...step.running_code import KNOWN_PACKAGES, is_known, place_of


_OURS = "hf_tpu_ext"
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
#: What upstream calls within a step; these call the rest.
METHODS_OF_A_STEP = ("training_step", "_clip_grad_norm", "_get_grad_norm")
#: And for each batch of an evaluation.
METHODS_OF_A_PREDICTION = ("prediction_step",)
EVENTS_OF_A_STEP = ("on_pre_optimizer_step", "on_optimizer_step")
#: Where a callback is called at every step, micro-step or batch, and layers cannot be handed out each time.
EVENTS_AT_EVERY_STEP = ("on_step_begin", "on_step_end", "on_substep_end", "on_prediction_step", *EVENTS_OF_A_STEP)
# Packages whose callbacks are known to look at no layers.
_PACKAGES_OF_CALLBACKS = (_OURS, "transformers")
# Of upstream's attributes: they change at every step, or are no part of what is computed. One that is missing here costs replay, and
# no number. What a step writes itself is not left out unseen: the next step may read it.
_BOOKKEEPING = {
    "_current_train_step_time",
    "_last_world_entropy",
    "_metrics",
    "_step",
    "_stored_metrics",
    "_total_train_tokens",
    "accelerator",
    "current_gradient_accumulation_steps",
    "entropy_coef",
    "lr_scheduler",
    "optimizer",
    "processing_class",
    "state",
}
#: Hooks that PyTorch calls for every module and every optimizer, by where it keeps them.
HOOKS_OF_ALL_MODULES = {
    f"{module}.{name}": value
    for module in ("torch.nn.modules.module", "torch.optim.optimizer")
    for name, value in vars(sys.modules[module]).items()
    if name.startswith("_global_") and isinstance(value, dict)
}


def owner_of(cls: type, method: str, ours: bool = True) -> type:
    """The class that a method of `cls` comes from, or would come from without those that are `ours`."""
    owners = (owner for owner in cls.__mro__ if method in vars(owner))
    return next(owner for owner in owners if ours or not owner.__module__.startswith(f"{_OURS}."))


# ---- Functions ----


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python functions that something stands for: those inside decorators, properties and partial functions, too."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, (partial, cached_property)):
        yield from _functions_in(value.func)
    elif isinstance(value, FunctionType):
        yield value
        if "__wrapped__" in vars(value):
            yield from _functions_in(value.__wrapped__)


def _is_known_function(function: FunctionType) -> bool:
    # Not `__module__`: `functools.wraps` copies it.
    name = function.__globals__.get("__name__", "")
    return is_known(name) or name.partition(".")[0] in sys.stdlib_module_names


def _is_known_code(value: Any) -> bool:
    functions = list(_functions_in(value))
    if isinstance(value, MethodType) and not isinstance(value.__self__, type):
        return is_known(type(value.__self__).__module__) and all(map(_is_known_function, functions))
    if functions or not callable(value) or isinstance(value, type) or inspect.isbuiltin(value):
        return all(map(_is_known_function, functions))
    return is_known(type(value).__module__) or type(value).__module__.partition(".")[0] in sys.stdlib_module_names


def _find_own_hook(hooks: dict[Any, Any] | None, what: str) -> str | None:
    """Name the first hook of the user's, which is `what`, with the place of its function, if that is one of Python."""
    for hook in (hooks or {}).values():
        if not _is_known_code(hook):
            places = [place_of(function.__code__) for function in _functions_in(hook)]
            return f"a user hook on {what}{f' ({places[0]})' if places else ''}"
    return None


def _is_installed(function: FunctionType) -> bool:
    """Whether a function is of an installed package, or of Python."""
    return _is_known_function(function) or function.__code__.co_filename.startswith(_INSTALLED)


# ---- What a step of a trainer class is made of ----


def functions_of(cls: type, name: str, packages: tuple[str, ...] = KNOWN_PACKAGES) -> Iterator[FunctionType]:
    """The functions of known packages that a name stands for in a class and its bases."""
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] in packages and name in vars(owner):
            for function in _functions_in(vars(owner)[name]):
                if is_known(function.__globals__["__name__"]):
                    yield function


def syntax_of(function: FunctionType) -> ast.Module:
    """The syntax of a function, by its source."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


@cache
def _names_of_self(function: FunctionType) -> frozenset[str]:
    """The attributes of `self` that a function reads. Trainers share most of their methods, whose sources take a while to read."""
    names = set()
    for node in ast.walk(syntax_of(function)):
        if isinstance(node, ast.Attribute):
            match node.value:
                case ast.Name(id="self") | ast.Call(func=ast.Name(id="super")):
                    names.add(node.attr)
    return frozenset(names)


@cache
def names_of_a_step(
    cls: type, methods: tuple[str, ...] = METHODS_OF_A_STEP, packages: tuple[str, ...] = KNOWN_PACKAGES
) -> frozenset[str]:
    """
    Find the methods and attributes of a trainer that the code of known packages reads within a step, in the methods
    called there and in those that they call.
    """
    reads: set[str] = set()
    names = list(methods)
    # Methods that upstream runs on the host, between programs, are left out, and so is what only they read.
    on_host = {name for owner in cls.__mro__ for name in vars(owner).get("methods_on_host", ())}
    while names:
        name = names.pop()
        if name in reads or name in on_host:
            continue
        reads.add(name)
        for function in functions_of(cls, name, packages):
            names.extend(_names_of_self(function))
    return frozenset(reads)


@cache
def computes_loss_by_itself(cls: type) -> bool:
    """Whether upstream's `prediction_step` of a trainer computes its loss without `compute_loss`, as CPO's and ORPO's do."""
    method = vars(owner_of(cls, "prediction_step", ours=False))["prediction_step"]
    names = {name for function in _functions_in(method) for name in _names_of_self(function)}
    return names.isdisjoint({"compute_loss", "prediction_step"})


def attributes_of_a_step(trainer: Trainer, methods: tuple[str, ...] = METHODS_OF_A_STEP) -> list[str]:
    """
    List the attributes of a trainer that upstream's code and the user's read within a step, in `methods` and those that they call,
    and that stay as they are. This package's own are not among them: it knows what it computes with.
    """
    upstream = tuple(package for package in KNOWN_PACKAGES if package != _OURS)
    reads = names_of_a_step(type(trainer), methods, packages=upstream) | _names_in_own_code(type(trainer), methods)
    return sorted(reads - _BOOKKEEPING)


def counters_in_own_code(trainer: Trainer, methods: tuple[str, ...]) -> list[str]:
    """Which counters of the run, that other code than a step's moves on, the user's code in `methods` of a trainer names."""
    return sorted(_names_in_own_code(type(trainer), methods) & {"global_step", "epoch"})


@cache
def _names_in_own_code(cls: type, methods: tuple[str, ...]) -> frozenset[str]:
    """The names in the user's methods of a trainer that a step calls. Some may be of other objects: there need not be a source to tell."""
    own = [vars(owner) for owner in cls.__mro__ if not is_known(owner.__module__)]
    found: set[str] = set()
    names = list(names_of_a_step(cls, methods))
    while names:
        name = names.pop()
        for function in [function for attributes in own for function in _functions_in(attributes.get(name))]:
            new = {*_names_in(function.__code__)} - found
            found |= new
            names += new
    return frozenset(found)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def namespaces_of_a_step(trainer: Trainer, models: Sequence[nn.Module]) -> dict[str, Any]:
    """The names that the code of a step looks up in classes and in their files, and what they stand for."""
    namespaces = {"torch.nn.functional": vars(nn.functional)}
    types = {type(trainer), *(type(module) for model in models for module in model.modules())}
    for cls in {cls for owner in types for cls in owner.__mro__}:
        if cls is not object and is_known(cls.__module__):
            namespaces[f"{cls.__module__}.{cls.__qualname__}"] = vars(cls)
            namespaces[cls.__module__] = vars(sys.modules[cls.__module__])
    return namespaces


# ---- Code of the user's ----


def find_own_code(
    trainer: Trainer, models: Sequence[nn.Module], methods: tuple[str, ...] = METHODS_OF_A_STEP
) -> str | None:
    """
    Look for code that is not of known packages and that runs within `methods` of the trainer, or in one of the models,
    the trained one first. Returns the first that was found, as a clause.
    """
    trains = methods is METHODS_OF_A_STEP
    return (
        _in_trainer(trainer, methods)
        or _in_callbacks(trainer.callback_handler.callbacks if trains else ())
        or _in_models(models)
        or _in_hooks(models)
        or _in_optimizer(trainer.optimizer if trains else None)
        or _in_namespaces(namespaces_of_a_step(trainer, models))
    )


def find_code_between_stages(trainer: Trainer) -> str | None:
    """Name code of the user's that runs between the backward pass and the update of a step, as a clause."""
    cls = type(trainer)
    for name in METHODS_OF_A_STEP:
        owner = owner_of(cls, name)
        if not is_known(owner.__module__):
            return f"{owner.__name__} overrides {name}"
        if name in vars(trainer) and not _is_known_code(vars(trainer)[name]):
            return f"trainer.{name} is user code"
    return _in_callbacks(trainer.callback_handler.callbacks) or _in_optimizer(trainer.optimizer)


def has_own_code(callback: TrainerCallback, event: str) -> bool:
    """
    Whether a callback may look at the layers of the model in an event, as `"on_save"`: it has code for it, and is not
    of this package or transformers.
    """
    owner = owner_of(type(callback), event)
    looks_at_none = owner is RichProgressCallback or owner.__module__.partition(".")[0] in _PACKAGES_OF_CALLBACKS
    return event in vars(callback) or not looks_at_none


def sees_micro_steps(callbacks: Iterable[TrainerCallback]) -> bool:
    """Whether a callback of the user's may look at gradients between two micro-steps."""
    return any(has_own_code(callback, "on_substep_end") for callback in callbacks)


def find_own_code_between_steps(trainer: Trainer) -> str | None:
    """Name code of the user's that runs between steps and may look at layers, as a clause."""
    classes = type(trainer).__mro__
    upstream = {name for cls in classes if is_known(cls.__module__) for name in vars(cls) if not name.startswith("__")}
    for owner in classes:
        if not is_known(owner.__module__):
            for name in sorted(upstream & vars(owner).keys()):
                return f"{owner.__name__} overrides {name}"
    for callback in trainer.callback_handler.callbacks:
        for event in EVENTS_AT_EVERY_STEP:
            if has_own_code(callback, event):
                return f"{type(callback).__name__} has code in {event}"
    return None


def _in_trainer(trainer: Trainer, methods: tuple[str, ...]) -> str | None:
    names = names_of_a_step(type(trainer), methods)
    for owner in type(trainer).__mro__:
        for name in sorted(names & vars(owner).keys()):
            if not is_known(owner.__module__):
                return f"{owner.__name__} overrides {name}"
            if not all(map(_is_known_function, _functions_in(vars(owner)[name]))):
                return f"{name} of {owner.__name__} is patched by user code"
    for name in sorted(names & vars(trainer).keys()):
        value = vars(trainer)[name]
        if callable(value) and not isinstance(value, nn.Module) and not _is_known_code(value):
            return f"{name} is user code" if name == "compute_loss_func" else f"trainer.{name} is user code"
    return None


def _in_callbacks(callbacks: Iterable[TrainerCallback]) -> str | None:
    for callback in callbacks:
        for event in EVENTS_OF_A_STEP:
            if event in vars(callback) or owner_of(type(callback), event) is not TrainerCallback:
                return f"{type(callback).__name__} has code in {event}, between the backward pass and the update"
    return None


def _in_models(models: Sequence[nn.Module]) -> str | None:
    for model in models:
        for name, module in model.named_modules():
            place = name or "the model"
            if not is_known(type(module).__module__):
                return f"{place} is a {type(module).__name__}, a custom module"
            for attribute, value in vars(module).items():
                if attribute in HOOKS:
                    if (found := _find_own_hook(value, place)) is not None:
                        return found
                elif callable(value) and not isinstance(value, nn.Module) and not _is_known_code(value):
                    return f"{attribute} of {place} is user code"
    return None


def _in_hooks(models: Sequence[nn.Module]) -> str | None:
    for name, hooks in HOOKS_OF_ALL_MODULES.items():
        if (found := _find_own_hook(hooks, f"all modules or optimizers, in {name}")) is not None:
            return found
    for model in models:
        for name, parameter in model.named_parameters():
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                if (found := _find_own_hook(hooks, f"the parameter {name}")) is not None:
                    return found
    return None


def _in_optimizer(optimizer: torch.optim.Optimizer | None) -> str | None:
    if optimizer is None:
        # It is made at the beginning of a run.
        return None
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        if (found := _find_own_hook(hooks, "the optimizer")) is not None:
            return found
    if not all(map(_is_known_code, (value for value in vars(optimizer).values() if callable(value)))):
        return "a method of the optimizer is patched by user code"
    return None


def _in_namespaces(namespaces: dict[str, Any]) -> str | None:
    for owner, names in namespaces.items():
        for name, value in names.items():
            if not all(map(_is_installed, _functions_in(value))):
                return f"{name} of {owner} is patched by user code"
    return None


def draws_other_layers(model: nn.Module) -> str | None:
    """Find the setting, and its value, by which a model leaves out other layers at every step."""
    base = unwrap_peft_model(model)
    if isinstance(base, PreTrainedModel):
        for key, value in base.config.to_dict().items():
            if "layerdrop" in key and value:
                return f"{key}={value}"
    return None
