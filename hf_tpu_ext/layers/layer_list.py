"""The layers of a model, and whether they are alike: the same but for the values of their parameters."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


_PLAIN = (bool, int, float, str, type(None))
# transformers' hooks that stay after hidden states were asked for once, and do nothing unless they are again.
_CAPTURES = "transformers.utils.output_capturing"


def find_layers(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Find the module that has the layers of a model, and under which name, if there is one list of layers."""
    found = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], GradientCheckpointingLayer)
    ]
    return found[0] if len(found) == 1 else None


def why_layers_differ(layers: nn.ModuleList, hook: Callable | None = None) -> str | None:
    """Why layers cannot be the turns of one loop: what differs. The forward `hook` may be on all of them."""
    first = _traits(layers[0])
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            hooks = [
                *module._forward_hooks.values(),
                *module._forward_pre_hooks.values(),
                *module._backward_hooks.values(),
            ]
            if any(registered != hook and registered.__module__ != _CAPTURES for registered in hooks):
                return f"a hook is registered on {name or 'the whole'} of layer {index}"
            if any(True for _ in module.buffers(recurse=False)):
                return f"{name or 'the whole'} of layer {index} has buffers"
        traits = _traits(layer)
        if traits.keys() != first.keys():
            return f"layer {index} has other modules than layer 0"
        for name, trait in traits.items():
            if trait != first[name]:
                return f"{name or 'the whole'} of layer {index} differs from that of layer 0"
    return None


def _traits(layer: nn.Module) -> dict[str, tuple]:
    """What has to be the same of each module."""
    return {
        name: (
            type(module),
            {key: value for key, value in vars(module).items() if _is_setting(value) and key != "layer_idx"},
            [
                (key, weight.shape, weight.dtype, weight.requires_grad)
                for key, weight in module.named_parameters(recurse=False)
            ],
        )
        for name, module in layer.named_modules()
    }


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a number, a string or a collection of them. Deeper ones name the place of their module."""
    if isinstance(value, (dict, list, tuple, set)):
        return all(isinstance(item, _PLAIN) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)
