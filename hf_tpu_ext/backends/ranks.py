"""The processes of a run, where each drives one device and has rows of its own, as a run asks about them. Here: one process."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .hosts import Hosts


class Ranks:
    """
    The processes that train one model, each on a device and with rows of its own. All run the same code in the same order.

    What is on the device is exchanged there; a compiled function is cut at these places. This is one process, which has nobody
    to exchange anything with.
    """

    #: How many there are, and which of them this is. The first writes what is written once.
    count = 1
    index = 0
    #: How they agree on the step after which all of them stop.
    stops = Hosts()

    # ---- On the device: autograd does not follow ----

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all, one after the other along their first dimension. Numbers (of no dimension) make a vector."""
        return tensor

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means over all, of tensors that have the same shapes on each."""
        return list(tensors)

    # ---- On the host ----

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The greatest of each of a few numbers."""
        return list(numbers)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each of a few numbers."""
        return list(numbers)

    def of_each(self, value: Any) -> list[Any]:
        """The values of all, in the order of their indices."""
        return [value]

    def by_first(self, function: Callable[[], Any]) -> Any:
        """What the first gets from a function, for all. Its `ValueError` or `OSError` is raised by all."""
        return function()

    def take_from_first(self, model: nn.Module) -> None:
        """Give all the weights of the first, before the model is placed. An adapter is random where it was made."""
