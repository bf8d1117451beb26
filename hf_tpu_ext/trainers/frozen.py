"""Training beside frozen weights that take half the memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..sharding import ShardingPlan
from ..step.frozen_weights import FrozenWeights, bfloat16_holds
from ..words import format_bytes


class FrozenWeightsMixin:
    """
    The part of [`TPUTrainerMixin`] that keeps frozen weights in bfloat16, see [`FrozenWeights`].

    They are only while the trainer uses the model. Whoever takes it out of the trainer, to merge adapters or to save it, has the
    dtypes that it came with.
    """

    #: Those of the trained model and of further ones, while they are in use.
    frozen_weights: list[FrozenWeights] | None = None

    @contextmanager
    def frozen_weights_in_bfloat16(self) -> Iterator[None]:
        """Within this context, frozen weights are bfloat16, where that changes no number."""
        if self.compiled.compute_dtype != torch.bfloat16 or self.frozen_weights is not None:
            yield
            return
        self.frozen_weights = [
            FrozenWeights(model, self.backend, ShardingPlan(model, self.mesh).specs)
            for model in (self.model, *self._further_models())
        ]
        try:
            for frozen in self.frozen_weights:
                frozen.shorten(self._bfloat16_holds)
            yield
        finally:
            for frozen in self.frozen_weights:
                frozen.restore()
            self.frozen_weights = None

    def _bfloat16_holds(self, weights: Sequence[Tensor]) -> list[bool]:
        """Say of each weight whether bfloat16 holds it exactly."""
        return bfloat16_holds(weights, self.backend)

    @property
    def _frozen_names(self) -> set[str]:
        """Parameters of the trained model that are bfloat16 for the time being."""
        return set() if self.frozen_weights is None else self.frozen_weights[0].names

    def _in_float32(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the trained model on the host, with the dtypes that it has without this."""
        return state_dict if self.frozen_weights is None else self.frozen_weights[0].in_float32(state_dict)

    def _frozen_lines(self) -> list[str]:
        """What a person is told about frozen weights at start."""
        num_bytes = sum(frozen.num_bytes for frozen in self.frozen_weights or ())
        if not num_bytes:
            return []
        return [
            f"frozen weights kept in bfloat16, which holds them exactly: {format_bytes(num_bytes)} instead of "
            f"{format_bytes(2 * num_bytes)}"
        ]
