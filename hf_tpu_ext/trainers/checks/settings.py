"""What cannot work on any device, besides the values of fields, is refused before a model is loaded."""

import difflib
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from trl import RewardConfig

from ...backends import select_backend
from ...errors import UserError
from ...hub_names import hint_at_similar, may_be_on_hub, why_no_tokenizer
from ..configs import ExtensionArguments
from .field_answers import Place
from .fields import adapt


# `peft_type` of the adapters that compute with sparse tensors.
_SPARSE_ADAPTERS = ("SHIRA", "FROD")
_NUMBERS = (int, float, int | None, float | None)
# For a task with labels PEFT adds all names that heads have in upstream's models.
_HEADS = ("classifier", "score", "qa_outputs")
# PEFT finds no layer by the names that it is given, or has none for the model where it is given none.
_NO_TARGETS = re.compile("not found in the base model|Please specify .target_modules")


def check_recipe(args: ExtensionArguments) -> None:
    """
    Refuse what cannot work, before any data is loaded, with a `ValueError` that says what to set instead. It is for runs that
    train with an optimizer of upstream's.
    """
    backend = select_backend(args.backend, args.num_chips, args.use_cpu)
    adapt(args, Place.of(backend, args), {"train_dataset": True})


def check_processes(args: TrainingArguments) -> None:
    """
    Refuse (`ValueError`) processes of a launcher that accelerate does not let train together: each would train the whole
    recipe by itself, and write the same files.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1 and "LOCAL_RANK" in os.environ and args.world_size == 1:
        raise UserError(
            f"A launcher has started {num_processes} processes, but without a GPU accelerate has each train by itself. Set "
            "use_cpu=True for processes on the CPU to train together, or start the script by python."
        )


def check_numbers(args: TrainingArguments) -> None:
    """Refuse text in place of a number (`ValueError`), as YAML reads 1e-4: upstream fails where it first computes with it."""
    for field in fields(args):
        value = vars(args).get(field.name)
        if isinstance(value, str) and field.type in _NUMBERS:
            text = f"{field.name}={value!r} is text, and has to be a number"
            try:
                float(value)
            except ValueError:
                raise UserError(f"{text}, for example {field.name}=1.") from None
            raise UserError(
                f"{text}: {field.name}={value}, without quotation marks; or float(...) of what a file says, where YAML takes 1e-4 for text "
                "and 1.0e-4 for a number."
            )


def check_model_names(trainer_kwargs: Mapping[str, Any]) -> None:
    """Refuse the path of a model that is not there, or has no tokenizer (`ValueError`). `trainer_kwargs` are as for [`adapt`]."""
    model = trainer_kwargs.get("model")
    if not isinstance(model, str):
        return
    if not os.path.exists(model) and not may_be_on_hub(model):
        raise UserError(
            f"model={model!r}: there is no such directory in {os.getcwd()}, where paths begin.{hint_at_similar(model)}"
        )
    if trainer_kwargs.get("processing_class") is None and (reason := why_no_tokenizer(model)) is not None:
        raise UserError(f"model: {reason}, or pass processing_class=AutoTokenizer.from_pretrained(...).")


def check_architecture(args: TrainingArguments, trainer_kwargs: Mapping[str, Any]) -> None:
    """
    Refuse (`ValueError`) the name of a model whose config.json does not say of which class it is: TRL makes it of that class,
    except for rewards, where the class is always the same. `trainer_kwargs` are as for [`adapt`].
    """
    if isinstance(args, RewardConfig):
        return
    settings = vars(args)
    trust_remote_code = (settings.get("model_init_kwargs") or {}).get(
        "trust_remote_code", settings.get("trust_remote_code")
    )
    for name in ("model", "teacher_model"):
        model = trainer_kwargs.get(name)
        if not isinstance(model, str):
            continue
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        if not config.architectures:
            example = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "LlamaForCausalLM")
            raise UserError(
                f"config.json of {model} has no `architectures`, by which TRL chooses the class of the model. Add it, for "
                f'example "architectures": ["{example}"], or load the model yourself: '
                f'{name}=AutoModelForCausalLM.from_pretrained("{model}").'
            )


def check_adapter(trainer_kwargs: Mapping[str, Any]) -> None:
    """Refuse an adapter that a TPU has no operators for (`ValueError`). The arguments are those of upstream's trainer."""
    model = trainer_kwargs.get("model")
    configs = model.peft_config.values() if isinstance(model, PeftModel) else [trainer_kwargs.get("peft_config")]
    for config in configs:
        # Older versions of peft lack some of the classes.
        if isinstance(config, PeftConfig) and config.peft_type in _SPARSE_ADAPTERS:
            raise UserError(
                f"peft_config={type(config).__name__}(...) computes with a sparse tensor, and torch_xla and torch_tpu have none. Take another "
                "adapter, for example peft_config=LoraConfig(...), or train it on CUDA (backend='cuda') or on the CPU (use_cpu=True)."
            )


@contextmanager
def naming_layers() -> Iterator[None]:
    """
    Context in which upstream puts an adapter on the model that it has loaded. Where PEFT finds no layer for it, the error names those
    of the model (`ValueError`).
    """
    try:
        yield
    except ValueError as error:
        # The model is a local of upstream's yet: the trainer has none.
        calls = [
            frame.f_locals
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code is get_peft_model.__code__
        ]
        if not calls or not _NO_TARGETS.search(str(error)):
            raise
        raise UserError(_advise_targets(calls[0]["model"], calls[0]["peft_config"].target_modules)) from error


def _advise_targets(model: nn.Module, target: str | set[str] | None) -> str:
    layers = {
        name.rpartition(".")[2]: None for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)
    }
    names = [target] if isinstance(target, str) else sorted(target or ())
    close = [match for name in names for match in difflib.get_close_matches(name, layers, n=1)]
    if target is None:
        problem = "is not set, and PEFT has no default for this model"
    else:
        problem = f"is {', '.join(map(repr, names))}, and no layer of the model has such a name"
    hint = f"Did you mean lora_target_modules: [{', '.join(close)}]? " if close else ""
    if isinstance(target, str):
        problem += ": one word alone is a regular expression for the whole name"
        hint = f"Did you mean lora_target_modules: '.*[.]{close[0]}'? " if close else ""
    listed = ", ".join([*layers][:20]) + ", ..." * (len(layers) > 20)
    return (
        f"lora_target_modules (target_modules of peft_config) {problem}. Its linear layers are {listed}. {hint}Set "
        "lora_target_modules: all-linear for all of them but the head."
    )


def absent_modules_of_adapter(model: nn.Module) -> Iterator[str]:
    """Lines on modules that an adapter's settings name and the model does not have: PEFT leaves them out without a word, if it finds one."""
    if not isinstance(model, PeftModel):
        return
    modules = [name for name, _ in model.named_modules()]
    for config in model.peft_config.values():
        for setting in ("target_modules", "modules_to_save"):
            names = vars(config).get(setting)
            for name in names if isinstance(names, (list, set)) else ():
                if name in _HEADS or any(module.endswith(name) for module in modules):
                    continue
                close = difflib.get_close_matches(name, {module.rpartition(".")[2] for module in modules}, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                yield f"{setting} of the adapter names {name!r}, and the model has no such module.{hint}"
