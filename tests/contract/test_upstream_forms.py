"""Each method that the trainers override, public or private, has upstream's form: whoever may call upstream's may call ours."""

import inspect
from unittest.mock import Mock

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer
from trl import GRPOTrainer

from hf_tpu_ext import trainers
from hf_tpu_ext.trainers import TPUGRPOTrainer, TPUTrainerMixin


class Composed(TPUTrainerMixin, Seq2SeqTrainer):
    """Another trainer of upstream's, with the mixin before it."""


TRAINERS = [Composed, *(vars(trainers)[name] for name in trainers.__all__ if name.endswith("Trainer"))]
ANY = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def is_ours(cls):
    return cls is Composed or cls.__module__.startswith("hf_tpu_ext.")


def overrides():
    """Every override of a method of upstream's, those that another one calls by `super()` too."""
    for cls in TRAINERS:
        upstream = next(base for base in cls.__mro__ if not is_ours(base) and issubclass(base, Trainer))
        outermost = set()
        for owner in filter(is_ours, cls.__mro__):
            names = {name for name in vars(owner).keys() & set(dir(upstream)) if not name.startswith("__")}
            for name in sorted(names):
                # What another override calls has the form of transformers' trainer.
                of = Trainer if name in outermost and hasattr(Trainer, name) else upstream
                yield pytest.param(owner, of, name, id=f"{cls.__name__}-{owner.__name__}.{name}")
            outermost |= names


def form_of(cls, name):
    """Upstream's form of a method. TRL's may hand everything on to that of transformers."""
    parameters = list(inspect.signature(inspect.getattr_static(cls, name)).parameters.values())
    if {parameter.kind for parameter in parameters[1:]} == ANY and len(parameters) == 3:
        behind = next(base for base in cls.__mro__[1:] if name in vars(base))
        return form_of(behind, name)
    return parameters


@pytest.mark.parametrize(("owner", "upstream", "name"), overrides())
def test_an_override_has_upstreams_form(owner, upstream, name):
    ours, theirs = vars(owner)[name], inspect.getattr_static(upstream, name)
    assert callable(getattr(owner, name)) == callable(getattr(upstream, name))
    assert isinstance(ours, property) == isinstance(theirs, property)
    if not callable(getattr(upstream, name)):
        return
    of_class = (classmethod, staticmethod)
    assert isinstance(ours, of_class) == isinstance(theirs, of_class)
    called = inspect.signature(getattr(owner, name) if isinstance(ours, of_class) else ours)
    expected = form_of(upstream, name)
    by_name = called.parameters
    hands_on = {parameter.kind for parameter in by_name.values()}
    named = [parameter for parameter in expected if parameter.kind not in ANY]
    required = [parameter for parameter in named if parameter.default is parameter.empty]
    first = [parameter.name for parameter in named if parameter.name == "self"]
    for taken in (named, required):
        called.bind(*(parameter.name for parameter in taken))
        called.bind(*first, **{parameter.name: None for parameter in taken if parameter.name not in first})
    assert {parameter.kind for parameter in expected} & ANY <= hands_on, "what upstream takes besides is dropped"
    for parameter in named:
        if parameter.name not in by_name:
            assert ANY <= hands_on, f"{parameter.name} has another name"
        elif parameter.default is not parameter.empty:
            assert by_name[parameter.name].default == parameter.default, f"{parameter.name} has another default"


def test_no_parameter_is_hidden_from_who_asks_for_the_form():
    """As TRL and users do, to see whether a trainer takes something."""
    for cls in TRAINERS:
        for name in ("train", "evaluate", "predict", "compute_loss", "training_step", "prediction_step", "save_model"):
            ours = inspect.signature(getattr(cls, name)).parameters
            theirs = inspect.signature(getattr(Trainer, name)).parameters
            assert [*ours][: len(theirs)] == [*theirs], f"{cls.__name__}.{name}"


def test_a_method_of_grpo_works_on_what_upstreams_works_on():
    """On an object that has nothing but what upstream's method reads, as in TRL's own tests."""
    generator = torch.Generator().manual_seed(0)
    entropies, mask = torch.rand(3, 4, generator=generator), torch.randint(0, 2, (3, 4), generator=generator)
    found = []
    for cls in (TPUGRPOTrainer, GRPOTrainer):
        trainer = Mock(spec=cls)
        trainer.accelerator = Mock(num_processes=1, gather=lambda values: values)
        trainer.accelerator.pad_across_processes = lambda values, **settings: values
        found.append(cls.get_high_entropy_mask(trainer, entropies, mask, threshold=0.6))
    assert torch.equal(*found)
