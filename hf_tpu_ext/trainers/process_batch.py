"""The batch of a process that drives several chips, as upstream's arguments say it."""

from functools import cache
from typing import Any

from transformers import TrainingArguments


class _OfAllChips:
    """
    Arguments by which a process takes `per_device_train_batch_size` rows for each of its chips, as upstream's take them for
    each GPU of a process. The fields stay as the caller gave them.
    """

    _given_class: type[TrainingArguments]
    _num_chips: int

    @property
    def train_batch_size(self) -> int:
        return super().train_batch_size * self._num_chips

    @property
    def eval_batch_size(self) -> int:
        return super().eval_batch_size * self._num_chips

    def __reduce_ex__(self, protocol: int) -> tuple:
        # Copies, and what is saved, are of the caller's class. In later protocols pickle looks at the class of the object, too.
        function, (_, *bases), *rest = super().__reduce_ex__(0)
        return function, (self._given_class, *bases), *rest


@cache
def _class_of_all_chips(cls: type[TrainingArguments], num_chips: int) -> type[TrainingArguments]:
    attributes: dict[str, Any] = {"_given_class": cls, "_num_chips": num_chips}
    attributes |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_OfAllChips, cls), attributes)


def count_all_chips(args: TrainingArguments, num_chips: int) -> None:
    """
    Make the batch of arguments that of all chips of this process, in `train_batch_size` and `eval_batch_size`.

    To upstream, which sees one device, the chips are one. It reads these two for samplers, dataloaders and speeds; it
    shows and saves the fields.
    """
    if num_chips > 1:
        args.__class__ = _class_of_all_chips(type(args), num_chips)
