"""The yardstick: a training loop written by hand for torch_xla, with nothing in it that the update does not need."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from transformers import AutoModelForCausalLM


class BareAdamW:
    """
    AdamW without weight decay. Its changing numbers are data, so that it is the same program at every step.

    Args:
        model ([`~torch.nn.Module`]):
            Model on the XLA device.
        learning_rate (`float`):
            Learning rate after warm-up.
        warmup_steps (`int`):
            Steps over which the learning rate rises from 0.
    """

    def __init__(self, model: nn.Module, learning_rate: float, warmup_steps: int):
        self.parameters = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
        self.learning_rate, self.warmup_steps, self.steps = learning_rate, warmup_steps, 0

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        learning_rate = self.learning_rate * min(1.0, self.steps / self.warmup_steps)
        self.steps += 1
        coefficients = torch.tensor([learning_rate / (1 - 0.9**self.steps), (1 - 0.999**self.steps) ** 0.5])
        step_size, correction = xm.send_cpu_data_to_device([coefficients], torch_xla.device())[0].unbind()
        for parameter, mean, square in self.parameters:
            # `copy_` is the one in-place operator that torch_xla does not check in Python, at 20 to 90 microseconds each.
            new_mean = mean.lerp(parameter.grad, 0.1)
            new_square = (square * 0.999).addcmul(parameter.grad, parameter.grad, value=0.001)
            parameter.copy_(parameter - new_mean / (new_square.sqrt() / correction + 1e-8) * step_size)
            mean.copy_(new_mean)
            square.copy_(new_square)


def train(
    model_dir: str | Path,
    batches: Iterator[dict[str, torch.Tensor]],
    total_steps: int,
    logging_steps: int,
    learning_rate: float,
    warmup_steps: int,
    on_step_begin: Callable[[int], None],
) -> dict[int, float]:
    """
    Train in float32, one program a step.

    Args:
        model_dir (`str` or `Path`):
            Directory of the model.
        batches (`Iterator[dict[str, torch.Tensor]]`):
            `input_ids`, `attention_mask` and `labels` of shape `(batch, length)` on the CPU, always the same shape.
        total_steps (`int`):
            Number of steps.
        logging_steps (`int`):
            Steps between two reads of the loss.
        learning_rate (`float`):
            Learning rate after warm-up.
        warmup_steps (`int`):
            Steps over which the learning rate rises from 0.
        on_step_begin (`Callable`):
            Called with the number of steps done before each step.

    Returns:
        `dict[int, float]`: Mean loss of each `logging_steps` steps, by the last of them.
    """
    device = torch_xla.device()
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").to(device).train()
    optimizer = BareAdamW(model, learning_rate, warmup_steps)
    torch_xla.sync(wait=True)
    losses, unread = {}, []
    for step, batch in zip(range(total_steps), batches, strict=False):
        on_step_begin(step)
        loss = model(**xm.send_cpu_data_to_device(batch, device), use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        model.zero_grad()
        torch_xla.sync()
        unread.append(loss.detach())
        if (step + 1) % logging_steps == 0:
            losses[step + 1] = torch.stack(unread).mean().item()
            unread.clear()
    return losses
