"""Activation checkpointing with the function that saves memory on the device in use."""

from collections.abc import Callable

from torch import nn


def use_checkpoint_function(model: nn.Module, function: Callable) -> int:
    """
    Make the layers that checkpoint their activations use `function`.

    transformers keeps the function in `_gradient_checkpointing_func` of each such layer
    (`transformers/modeling_layers.py`), set when checkpointing is enabled.

    Args:
        model ([`~torch.nn.Module`]):
            Model with activation checkpointing enabled.
        function (`Callable`):
            Called as `function(layer, *inputs)`.

    Returns:
        `int`: Number of layers changed.
    """
    layers = [module for module in model.modules() if "_gradient_checkpointing_func" in vars(module)]
    for layer in layers:
        layer._gradient_checkpointing_func = function
    return len(layers)
