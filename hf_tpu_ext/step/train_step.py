"""A training step, as a function: what is computed in it, in this order."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .gradients import StepGradients


#: The micro-step with the optimizer's update, and those before it that only add to the gradients.
OPTIMIZER_STEP, MICRO_STEP = "training step", "micro-step"
#: Appended to the kind of a program whose model is in evaluation mode, for `hf-tpu plan` and warm-up to tell it apart.
OF_EVALUATION = " of an evaluation"


def train_step(
    forward_backward: Callable[[nn.Module, dict[str, Any], Tensor | int | None], Tensor],
    gradients: StepGradients,
    add_loss: Callable[[Tensor, bool], None],
    clip: Callable[[nn.Module], Tensor],
    update: Callable[[Tensor], None],
    model: nn.Module,
    batch: dict[str, Any],
    numbers: dict[str, Any],
    sync_gradients: bool,
) -> dict[str, Tensor]:
    """
    A micro-step of training as one program; the last one of an optimizer step also updates the weights.

    Everything that lasts is written in place: weights, gradients that are kept, moments, the average of the weights, sums for the log.
    Where code of the user's runs between the backward pass and the update, upstream's loop calls the same stages one by one.

    Args:
        forward_backward (`Callable`):
            Upstream's loss as upstream has written it, and its backward pass, of the model, the batch and `numbers["num_items_in_batch"]`.
            Returns the loss of the micro-step, detached, of all chips.
        gradients ([`StepGradients`]):
            Where gradients are between micro-steps. With manual sharding they are summed over the chips in the last one.
        add_loss (`Callable`):
            Adds the loss to the sums of the log; called with whether the micro-step closes an optimizer step.
        clip (`Callable`):
            Clips the gradients, and returns their norm before.
        update (`Callable`):
            Updates the weights, the moments and the average of the weights, given `numbers["update"]`, which are those of
            [`~hf_tpu_ext.step.optimizer.LazyAdamW`].
        model ([`~torch.nn.Module`]):
            The model that is trained.
        batch (`dict[str, Any]`):
            Its tensors are on the device, of a declared shape.
        numbers (`dict[str, Any]`):
            What differs from step to step, as tensors on the device: learning rates, the number of tokens and of micro-steps, a seed.
        sync_gradients (`bool`):
            Whether the micro-step closes an optimizer step.

    Returns:
        `dict[str, torch.Tensor]`: `"grad_norm"` of shape `()`, float32, of the last micro-step; nothing of others.
    """
    with gradients.micro_step(sync_gradients):
        loss = forward_backward(model, batch, numbers["num_items_in_batch"])
    add_loss(loss, sync_gradients)
    if not sync_gradients:
        return {}
    grad_norm = clip(model)
    update(numbers["update"])
    gradients.drop()
    return {"grad_norm": grad_norm}
