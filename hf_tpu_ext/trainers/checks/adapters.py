"""Checks of the adapter that a trainer trains."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from peft import PeftModel, ShiraConfig
from torch import nn

from ...errors import UserError


# For a task with labels PEFT adds all names that heads have in upstream's models.
_HEADS = ("classifier", "score", "qa_outputs")


def check_adapter(trainer_kwargs: Mapping[str, Any]) -> None:
    """Refuse an adapter that torch_xla has no operators for (`ValueError`). The arguments are those of upstream's trainer."""
    model = trainer_kwargs.get("model")
    configs = model.peft_config.values() if isinstance(model, PeftModel) else [trainer_kwargs.get("peft_config")]
    if any(isinstance(config, ShiraConfig) for config in configs):
        raise UserError(
            "SHiRA adds a sparse tensor to a weight (peft_config=ShiraConfig(...)), and torch_xla has no sparse tensors. Take another "
            "adapter, for example peft_config=LoraConfig(...), or train it on CUDA (backend='cuda') or on the CPU (use_cpu=True)."
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
