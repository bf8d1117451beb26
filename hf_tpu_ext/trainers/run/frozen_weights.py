"""Training beside frozen weights that take half the memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ...backends.base import Backend
from ...formatting import format_bytes
from ...layers.frozen_weights import FrozenWeights
from ...sharding import ShardingPlan


class ShortFrozenWeights:
    """
    Keeps the frozen weights of a trainer in bfloat16, see [`FrozenWeights`].

    They are only while the trainer uses the model. Whoever takes it out of the trainer, to merge adapters or to save
    it, has the dtypes that it came with.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        #: Those of the trained model and of further ones, while they are in use.
        self.in_use: list[FrozenWeights] | None = None

    @contextmanager
    def in_bfloat16(
        self, models: Sequence[nn.Module], mesh: dict[str, int], holds: Callable[[Sequence[Tensor]], list[bool]]
    ) -> Iterator[None]:
        """
        Within this context, frozen weights of models, the first of which is the trained one, are bfloat16 where `holds` says that
        bfloat16 holds them exactly.
        """
        assert self.in_use is None, "they are bfloat16 already"
        self.in_use = [FrozenWeights(model, self._backend, ShardingPlan(model, mesh).specs) for model in models]
        try:
            for frozen in self.in_use:
                frozen.shorten(holds)
            yield
        finally:
            for frozen in self.in_use:
                frozen.restore()
            self.in_use = None

    @property
    def names(self) -> set[str]:
        """Parameters of the trained model that are bfloat16 for the time being."""
        return set() if self.in_use is None else self.in_use[0].names

    def in_float32(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give a state dict of the trained model, on the host, the dtypes that it has without this."""
        return state_dict if self.in_use is None else self.in_use[0].in_float32(state_dict)

    def lines(self) -> list[str]:
        """What a person is told about frozen weights at start."""
        num_bytes = sum(frozen.num_bytes for frozen in self.in_use or ())
        if not num_bytes:
            return []
        return [
            f"frozen weights in bfloat16 (exact): {format_bytes(num_bytes)} of HBM instead of "
            f"{format_bytes(2 * num_bytes)}"
        ]
