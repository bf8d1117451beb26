"""Exponential moving average (EMA) of the weights that are trained."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """
    Exponential moving average of weights: `average = decay * average + (1 - decay) * weight` after each optimizer step,
    from the weights that the run begins with. Weights of a short dtype have an average in float32: in bfloat16 it would not
    move, since `1 - decay` of a difference is lost in rounding.

    With `warmup`, update `n`, counted from 0, has `min(decay, (1 + n) / (10 + n))`, as `tf.train.ExponentialMovingAverage` with
    `num_updates` and diffusers' `EMAModel` have it: early averages forget the first weights sooner.
    """

    def __init__(self, decay: float, warmup: bool = False):
        self.decay, self.warmup = decay, warmup
        #: How many updates there were.
        self.updates = 0
        #: The averages by the parameters that they follow.
        self.values: dict[nn.Parameter, Tensor] = {}

    def restart(self) -> None:
        """Forget all averages."""
        self.updates, self.values = 0, {}

    @torch.no_grad()
    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Follow these parameters and no others. An average that is not there yet begins as its weight."""
        earlier = self.values
        # Not a copy, which on XLA shares the buffer of the weight, and steps give that to their programs.
        self.values = {
            parameter: earlier[parameter]
            if parameter in earlier
            else parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)) * 1
            for parameter in parameters
        }
        if self.values.keys().isdisjoint(earlier):
            self.updates = 0

    @torch.no_grad()
    def split(self, stacked_parameter: nn.Parameter, parts: Iterable[nn.Parameter]) -> None:
        """Follow the parts of a stacked parameter from now on, in its place."""
        whole = self.values.pop(stacked_parameter)
        self.values |= {part: value.clone() for part, value in zip(parts, whole.unbind(), strict=True)}

    def next_decay(self) -> float:
        """Count an update, and return its decay."""
        number, self.updates = self.updates, self.updates + 1
        return min(self.decay, (1 + number) / (10 + number)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, share: Tensor) -> None:
        """Move the averages to their weights, by `1 - decay` of the way. That is data: a warm-up does not recompile."""
        for parameter, average in self.values.items():
            # By `copy_`, see [`LazyAdamW.step`].
            average.copy_(average + (parameter - average) * share)

    @torch.no_grad()
    def update_eagerly(self, decay: float) -> None:
        """As `update`, on a device that runs operators one by one: few for all weights together."""
        weights = [parameter.to(average.dtype) for parameter, average in self.values.items()]
        if weights:
            get_ema_multi_avg_fn(decay)(list(self.values.values()), weights, None)


@contextmanager
def in_place_of_weights(averages: Iterable[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Within this context, parameters have the values that they come with, in their own dtype. Nothing may train them."""
    averages = list(averages)
    weights = [parameter.data for parameter, _ in averages]
    try:
        for parameter, average in averages:
            parameter.data = average.to(parameter.dtype)
        yield
    finally:
        for (parameter, _), weight in zip(averages, weights, strict=True):
            parameter.data = weight
