"""The metrics of a TRL trainer, summed on the device between two logs."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from ...backends.base import Backend
from ...step.deferred_reads import Appended, DeferredReads, metrics_in
from ...step.metrics import DeviceSums
from .user_code import functions_of, names_of_a_step, syntax_of


#: TRL keeps under this name the tokens that were trained on, of the whole run.
NUM_TOKENS = "num_tokens"


class DeferredMetrics:
    """
    Keeps on the device what the loss of a TRL trainer appends to `trainer._metrics`, and the tokens that it counts. Some
    trainers of `trl.experimental` have `trainer._stored_metrics` in its place, and count no tokens.

    Upstream's loss runs as it is written, see [`DeferredReads`]. What it appends is added to sums that belong to the step's
    program. At a log their means are put where upstream's `log` looks for them.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer. One that keeps no metrics has none here, either.
        backend ([`Backend`]):
            Where the sums are kept. On an eager device upstream reads the metrics at each step.
        names (`tuple[str, ...]`, *optional*):
            Further metrics that the loss appends, besides those of upstream's code.
    """

    def __init__(self, trainer: Trainer, backend: Backend, names: tuple[str, ...] = ()):
        self._trainer = trainer
        self._backend = backend
        self.names = sorted({*_metrics_of(type(trainer)), *names})
        # Where upstream keeps them.
        self._kept_in = "_metrics"
        if "_stored_metrics" in vars(trainer):
            self._kept_in, trainer._total_train_tokens = "_stored_metrics", 0
        self._active = False
        # Whether upstream's loss counts the tokens that were trained on, and shows them.
        self._counts_tokens = False
        # What the loss has appended, by mode.
        self._appended: dict[str, set[str]] = {"train": set(), "eval": set()}
        self._sums: dict[str, DeviceSums] = {}
        if self.names and backend.metrics_on_device:
            sums = [of_name for name in self.names for of_name in (name, _count(name))]
            self._sums = {mode: DeviceSums(backend, sums, (NUM_TOKENS,)) for mode in ("train", "eval")}

    @property
    def _kept(self) -> dict[str, dict[str, list]]:
        return vars(self._trainer)[self._kept_in]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context of a loss. Whatever it appends to `trainer._metrics` stays on the device."""
        if not self._sums or self._active:
            yield
            return
        trainer, mode = self._trainer, "train" if self._trainer.model.training else "eval"
        kept, total = self._kept, trainer._total_train_tokens
        reads = DeferredReads(self._backend.device.type, "trl")
        appended = {name: defaultdict(partial(Appended, reads)) for name in self._sums}
        vars(trainer)[self._kept_in] = appended
        trainer._total_train_tokens = 0
        self._active = True
        try:
            with reads:
                yield
            self._add(mode, appended[mode], trainer._total_train_tokens)
        finally:
            vars(trainer)[self._kept_in], trainer._total_train_tokens = kept, total
            self._active = False

    def _add(self, mode: str, appended: dict[str, list], num_tokens: Tensor | int) -> None:
        sums, added = self._sums[mode], {}
        for name, values in appended.items():
            if not isinstance(values, Appended):
                # The number of tokens, which is counted apart.
                self._counts_tokens |= name == NUM_TOKENS
                continue
            self._appended[mode].add(name)
            if name not in self.names:
                self.names.append(name)
                sums.extend([name, _count(name)])
            added[name], added[_count(name)] = 0.0, 0.0
            for value, condition in zip(values, values.conditions, strict=True):
                value = self._on_device(value)
                weight = torch.ones_like(value)
                if self._trainer.drops_nan_metrics:
                    is_number = ~torch.isnan(value)
                    condition = is_number if condition is None else condition & is_number
                if condition is not None:
                    value, weight = (torch.where(condition, v, torch.zeros_like(v)) for v in (value, weight))
                added[name] = added[name] + value
                added[_count(name)] = added[_count(name)] + weight
        if isinstance(num_tokens, Tensor):
            added[NUM_TOKENS] = num_tokens
        sums.add(**added)

    def _on_device(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().float()
        return torch.full((), value, dtype=torch.float32, device=self._backend.device)

    # ---- Logs ----

    def tensors(self, mode: str) -> dict[str, Tensor]:
        """
        The sums that a log reads.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.

        Returns:
            `dict[str, torch.Tensor]`: Device scalars by name.
        """
        if not self._sums:
            return {}
        # An evaluation shows the tokens trained on so far, too.
        return {**self._sums[mode].tensors, NUM_TOKENS: self._sums["train"].tensors[NUM_TOKENS]}

    def sums(self, mode: str) -> dict[str, Tensor]:
        """The sums of `"train"` or `"eval"` themselves, by name; they may be replaced."""
        return self._sums[mode].tensors if self._sums else {}

    def changed_by(self, mode: str) -> list[Tensor]:
        """The sums that a training step changes, or a batch of an evaluation, always in the same order."""
        return [*self._sums[mode].tensors.values()] if self._sums else []

    def take(self, mode: str, fetched: dict[str, Tensor]) -> None:
        """
        Put the means where upstream's `log` looks for them, and start anew.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
            fetched (`dict[str, torch.Tensor]`):
                What [`~DeferredMetrics.tensors`] gave, on the CPU.
        """
        if not fetched:
            return
        trainer = self._trainer
        values = {name: tensor.item() for name, tensor in fetched.items()}
        trainer._total_train_tokens += values[NUM_TOKENS]
        seen = [name for name in self.names if values.get(_count(name))]
        if mode == "eval" or not seen:
            self._sums["train"].reset([NUM_TOKENS])
        if not seen:
            return
        self._sums[mode].reset()
        # Upstream's `log` shows the mean of these lists.
        self._kept[mode].update({name: [values[name] / values[_count(name)]] for name in seen})
        if trainer.drops_nan_metrics:
            # Upstream shows `None` where there was no number.
            self._kept[mode].update({name: [] for name in self._appended[mode].difference(seen)})
        if self._counts_tokens:
            self._kept[mode][NUM_TOKENS] = [trainer._total_train_tokens]

    def drop(self, mode: str) -> None:
        """
        Forget what the next log of `mode` would show.

        Args:
            mode (`str`):
                `"train"` or `"eval"`.
        """
        if self._sums:
            # Tokens were trained on, whatever came of the run.
            self._sums[mode].reset({*self._sums[mode].tensors} - {NUM_TOKENS})
        if self.names:
            self._kept[mode].clear()

    # ---- Checkpoints ----

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        if not self.names:
            return {}
        pending = self._backend.fetch(self._sums["train"].tensors[NUM_TOKENS]).item() if self._sums else 0
        return {NUM_TOKENS: self._trainer._total_train_tokens + pending}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave when the checkpoint was written; empty for one of another trainer."""
        if self.names:
            self._trainer._total_train_tokens = state.get(NUM_TOKENS, 0)
        if self._sums:
            self._sums["train"].reset([NUM_TOKENS])


def _count(name: str) -> str:
    return f"{name} (count)"


@cache
def _metrics_of(cls: type[Trainer]) -> frozenset[str]:
    """The metrics that the loss of a trainer class appends, by its source."""
    functions = (function for name in names_of_a_step(cls, ("compute_loss",)) for function in functions_of(cls, name))
    return frozenset(metric for function in functions for metric in metrics_in(syntax_of(function)))
