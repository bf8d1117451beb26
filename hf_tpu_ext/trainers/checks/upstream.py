"""Checks of the upstream class that a trainer is made of."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any, get_args, get_type_hints

from transformers import Trainer, TrainingArguments
from trl.trainer.utils import get_config_model_id

from ...errors import UserError
from .datasets import named_datasets, refuse_images
from .preferences import check_preferences


# Trainers of TRL whose steps write text, so that they are no function of a batch.
_GENERATE = {
    "A2POTrainer",
    "AsyncDistillationTrainer",
    "AsyncGRPOTrainer",
    "DistillationTrainer",
    "GKDTrainer",
    "GOLDTrainer",
    "GRPOTrainer",
    "IWOPDTrainer",
    "OnlineDPOTrainer",
    "RLOOTrainer",
    "SDFTTrainer",
    "SDPOTrainer",
    "XPOTrainer",
}
# Trainers of TRL that a trainer of this package stands in for.
_REPLACED = {"DistillationTrainer", "GRPOTrainer", "RLOOTrainer"}
# Trainers of TRL that have a collator for images.
_TAKE_IMAGES = {"DPOTrainer", "KTOTrainer", "SFTTrainer"}
_TAKE_PREFERENCES = {"DPOTrainer", "KTOTrainer", "RewardTrainer"}


def upstream_of(cls: type[Trainer]) -> type[Trainer]:
    """The first base of a trainer class that is of transformers or TRL."""
    return next(filter(_is_upstreams, cls.__mro__))


def upstream_behind(cls: type[Trainer]) -> type[Trainer]:
    """
    The first base of a trainer class that is of transformers or TRL and behind all that are of this package. It is another
    than [`upstream_of`] where TRL's trainers are replaced by ours, and a trainer of `trl.experimental` derives from one.
    """
    return next(filter(_is_upstreams, _behind(cls)))


def signature_of(cls: type[Trainer]) -> inspect.Signature:
    """
    What the classes behind this package's take to be made. A class that passes `*args` or `**kwargs` on takes what the next one
    takes, by name.
    """
    by_position: dict[str, inspect.Parameter] = {}
    by_name: dict[str, inspect.Parameter] = {}
    passes = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    place = by_position
    for owner in (owner for owner in _behind(cls) if "__init__" in vars(owner)):
        _, *parameters = inspect.signature(owner.__init__).parameters.values()
        for each in parameters:
            if each.kind not in passes and each.name not in by_position | by_name:
                (by_name if each.kind is each.KEYWORD_ONLY else place)[each.name] = each
        kinds = passes & {each.kind for each in parameters}
        if not kinds:
            break
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            place = by_name
    keyword_only = (each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in by_name.values())
    return inspect.Signature([*by_position.values(), *keyword_only])


def _behind(cls: type[Trainer]) -> Sequence[type]:
    """The classes that a trainer class derives from and that are behind all of this package."""
    last = max(index for index, owner in enumerate(cls.__mro__) if _package_of(owner) == "hf_tpu_ext")
    return cls.__mro__[last + 1 :]


def _is_upstreams(owner: type) -> bool:
    return issubclass(owner, Trainer) and _package_of(owner) in ("transformers", "trl")


def _package_of(owner: type) -> str:
    return owner.__module__.partition(".")[0]


def check_trainer(cls: type[Trainer], trainer_kwargs: Mapping[str, Any], compiles: bool) -> None:
    """
    Refuse what cannot work (`ValueError`), before a model is loaded: preference data without its columns, or of which some rows are text
    and others messages, and a reference model that is a name. Where XLA `compiles` steps, also trainers that write text within their
    steps, datasets with images, and rows that prefer nothing. `trainer_kwargs` are the trainer's arguments, by name.
    """
    upstream = upstream_of(cls)
    takes_preferences = upstream.__name__ in _TAKE_PREFERENCES
    generates = sorted({owner.__name__ for owner in upstream.__mro__} & _GENERATE)
    if compiles and cls.generates:
        cls.check_trainer_kwargs(trainer_kwargs)
    elif compiles and generates:
        module = upstream.__module__.rpartition(".")[0]
        instead = f"Use {module}.{{}} on CUDA" if generates[0] not in _REPLACED else "Use hf_tpu_ext.TPU{}, which does"
        raise UserError(
            f"{generates[0]} generates text within a training step, for which it has no programs on XLA. "
            f"{instead.format(generates[0])}. Trainers whose loss is a function of a batch work: transformers.Trainer, "
            "SFTTrainer, RewardTrainer, DPOTrainer, KTOTrainer."
        )
    for name, dataset in named_datasets(trainer_kwargs).items():
        if compiles and upstream.__module__.startswith("trl.") and upstream.__name__ not in _TAKE_IMAGES:
            refuse_images(dataset, name, upstream.__name__)
        if takes_preferences:
            # Upstream looks for columns when the model is loaded.
            check_preferences(dataset, name, upstream.__name__, compiles)
    reference = trainer_kwargs.get("ref_model")
    if isinstance(reference, str) and takes_preferences:
        raise UserError(
            f"ref_model={reference!r} is a name, and the reference has to be a loaded model. Pass "
            f"ref_model=AutoModelForCausalLM.from_pretrained({reference!r})."
        )


def overrides_loss(cls: type[Trainer]) -> bool:
    """Whether a trainer class has code of its own for the loss, which may know other names of losses than upstream's."""
    return any(
        not owner.__module__.startswith(("hf_tpu_ext.", "transformers.", "trl.trainer."))
        for owner in cls.__mro__
        if not {"compute_loss", "_compute_loss"}.isdisjoint(vars(owner))
    )


def loads_model(args: TrainingArguments, call: inspect.BoundArguments) -> bool:
    """Whether the trainer that a call makes loads a model with `model_init_kwargs`: the trained one by its name, or a reference."""
    if isinstance(call.arguments.get("model"), str):
        return True
    takes_reference = "ref_model" in call.signature.parameters and call.arguments.get("ref_model") is None
    # Without them, a reference is loaded as the model is.
    return takes_reference and bool(vars(args).get("model_init_kwargs"))


def default_arguments(cls: type[Trainer], model) -> TrainingArguments:
    """Make the arguments that upstream makes where none are given, from the model or its name."""
    upstream = upstream_of(cls)
    if upstream is Trainer:
        return TrainingArguments(output_dir="tmp_trainer")
    # A class that passes its arguments on does not say their type.
    hints = (get_type_hints(owner.__init__) for owner in upstream.__mro__)
    of_args = get_args(next(hint["args"] for hint in hints if "args" in hint))
    config_cls = next(kind for kind in of_args if issubclass(kind, TrainingArguments))
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return config_cls(f"{name.split('/')[-1]}-{upstream.__name__.removesuffix('Trainer')}")


@contextmanager
def upstream_names(cls: type[Trainer], **replacements: Any) -> Iterator[None]:
    """
    Within this context, functions that the modules of upstream's trainer, and of those that it is made of, have by these names
    are replaced. In their place `replacements` are called, with their arguments and the function itself under its name. What is
    no function is put in its place as it is. A name that a module does not have is left out.
    """
    upstream = upstream_of(cls)
    owners = [
        owner for owner in upstream.__mro__ if owner is upstream or _is_upstreams(owner) and owner is not Trainer
    ]
    places = [vars(sys.modules[module]) for module in dict.fromkeys(owner.__module__ for owner in owners)]
    originals = [{name: names[name] for name in replacements if name in names} for names in places]
    for names, functions in zip(places, originals, strict=True):
        for name, function in functions.items():
            replacement = replacements[name]
            bind = _bind_once if isinstance(replacement, FunctionType) else _bind
            names[name] = bind(replacement, name, function) if callable(replacement) else replacement
    try:
        yield
    finally:
        for names, functions in zip(places, originals, strict=True):
            names.update(functions)


def _bind(replacement: Callable, name: str, function: Callable) -> Callable:
    return partial(replacement, **{name: function})


# The same object each time: what a replayed program may have read is compared by identity.
_bind_once = cache(_bind)


@contextmanager
def checkpointing_left_on(cls: type[Trainer]) -> Iterator[None]:
    """
    Context within which a trainer of TRL leaves activation checkpointing on where it runs a model without gradients.

    Switching it on again would put PyTorch's own function in place of XLA's, and register hooks anew at each step.
    Without gradients nothing is kept for the backward pass anyway.
    """
    with upstream_names(cls, disable_gradient_checkpointing=_without_warning):
        yield


@contextmanager
def _without_warning(*_, **__) -> Iterator[None]:
    with warnings.catch_warnings():
        # It is about models that are to be trained.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield
