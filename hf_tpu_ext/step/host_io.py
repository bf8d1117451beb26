"""What people do with a model that is on a lazy device: call it with CPU tensors, save it."""

from collections.abc import Iterable
from functools import wraps
from inspect import signature
from typing import Any

import peft.peft_model
import peft.tuners.lora.model
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..backends.base import Backend


def _inputs_to_device(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    device = next((parameter.device for parameter in module.parameters()), None)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device) if tensor.device.type == "cpu" else tensor

    return (args, kwargs) if device is None else tree_map_only(torch.Tensor, move, (args, kwargs))


def accept_cpu_tensors(model: nn.Module) -> None:
    """
    Let a model be called with CPU tensors wherever it is: `model(**tokenizer("Hi", return_tensors="pt"))`. The one
    inside a [`~peft.PeftModel`] is changed as well, for when adapters are merged.
    """
    for module in {model, unwrap_peft_model(model)}:
        if _inputs_to_device not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_inputs_to_device, prepend=True, with_kwargs=True)


def _is_on(backend: Backend, tensors: Iterable[Any]) -> bool:
    return any(isinstance(tensor, torch.Tensor) and tensor.device.type == backend.device.type for tensor in tensors)


def save_from_host(backend: Backend) -> None:
    """
    Have `save_pretrained` of models and of adapters write tensors that are on a device without addresses.

    transformers and PEFT find tied weights by their address. Parameters cross to the host in one transfer, and those
    that are one parameter there are one tensor.
    """
    save_pretrained = PreTrainedModel.save_pretrained
    adapter_weights = peft.peft_model.get_peft_model_state_dict
    if save_pretrained.__module__ == __name__:
        return

    @wraps(save_pretrained)
    def save(self, *args, **kwargs) -> None:
        arguments = signature(save_pretrained).bind(self, *args, **kwargs)
        if arguments.arguments.get("state_dict") is None and _is_on(backend, self.parameters()):
            arguments.arguments["state_dict"] = backend.fetch(dict(self.state_dict(keep_vars=True)))
        # transformers notes there what it saves, the dtype in other words. To what replays steps, that is another config.
        config_before = dict(vars(self.config))
        try:
            return save_pretrained(*arguments.args, **arguments.kwargs)
        finally:
            vars(self.config).update(config_before)

    @wraps(adapter_weights)
    def fetch_adapter_weights(*args, **kwargs) -> dict[str, torch.Tensor]:
        weights = adapter_weights(*args, **kwargs)
        return backend.fetch(weights) if _is_on(backend, weights.values()) else weights

    save.__module__ = __name__
    PreTrainedModel.save_pretrained = save
    # The second takes weights from the first's, to convert an adapter that has changed its base (PiSSA).
    for module in (peft.peft_model, peft.tuners.lora.model):
        module.get_peft_model_state_dict = fetch_adapter_weights
