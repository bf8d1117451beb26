"""The metrics of a TRL trainer, summed on the device between two logs."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily
from transformers import Trainer

from ...step.deferred_reads import Appended, DeferredReads, metrics_in
from ...step.metrics import DeviceSums
from ...temporarily import temporarily
from .user_code import functions_of, names_of_a_step, syntax_of


#: TRL keeps under this name the tokens that were trained on, of the whole run.
NUM_TOKENS = "num_tokens"


class MetricsMixin:
    """
    The part of [`TPUTrainerMixin`] that keeps on the device what the loss of a TRL trainer appends to `self._metrics`, and the tokens
    that it counts. Some trainers of `trl.experimental` have `self._stored_metrics` in its place, and count no tokens.

    Upstream's loss runs as it is written, see [`DeferredReads`]. What it appends is added to sums that belong to the step's program. At a
    log their means are put where upstream's `log` looks for them. On an eager device upstream reads the metrics at each step.
    """

    def _arrange_metrics(self) -> None:
        """After upstream's `__init__`. A trainer that keeps no metrics has none here, either."""
        self._metric_names = sorted({*_metrics_of(type(self)), *self._more_metrics()})
        # Where upstream keeps them.
        self._metrics_kept_in = "_metrics"
        if "_stored_metrics" in vars(self):
            self._metrics_kept_in, self._total_train_tokens = "_stored_metrics", 0
        self._defers_metrics = False
        # Whether upstream's loss counts the tokens that were trained on, and shows them.
        self._shows_num_tokens = False
        # What the loss has appended, by mode.
        self._appended_metrics: dict[str, set[str]] = {"train": set(), "eval": set()}
        self._metric_sums: dict[str, DeviceSums] = {}
        #: The sums that a training step changes, or a batch of an evaluation, by mode and name, always in the same order.
        self.metric_tensors: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        if self._metric_names and self.backend.metrics_on_device:
            sums = [of_name for name in self._metric_names for of_name in (name, _count(name))]
            self._metric_sums = {mode: DeviceSums(self.backend, sums, (NUM_TOKENS,)) for mode in ("train", "eval")}
            self.metric_tensors = {mode: sums_of_mode.tensors for mode, sums_of_mode in self._metric_sums.items()}

    @property
    def _kept_metrics(self) -> dict[str, dict[str, list]]:
        return vars(self)[self._metrics_kept_in]

    @contextmanager
    def metrics_deferred(self) -> Iterator[None]:
        """Context of a loss. Whatever it appends to `self._metrics` stays on the device."""
        if not self._metric_sums or self._defers_metrics:
            yield
            return
        mode = "train" if self.model.training else "eval"
        reads = DeferredReads(self.backend.device.type, "trl")
        appended_values = {name: defaultdict(partial(Appended, reads)) for name in self._metric_sums}
        loss_func = None if self.compute_loss_func is None else partial(_without_mode, self.compute_loss_func)
        kept = {self._metrics_kept_in: appended_values}
        with temporarily(self, **kept, _total_train_tokens=0, _defers_metrics=True, compute_loss_func=loss_func):
            with reads:
                yield
            self._add_metrics(mode, appended_values[mode], self._total_train_tokens)

    def _add_metrics(self, mode: str, appended_values: dict[str, list], num_tokens: Tensor | int) -> None:
        sums, totals = self._metric_sums[mode], {}
        for name, values in appended_values.items():
            if not isinstance(values, Appended):
                # The number of tokens, which is counted apart.
                self._shows_num_tokens |= name == NUM_TOKENS
                continue
            self._appended_metrics[mode].add(name)
            if name not in self._metric_names:
                self._metric_names.append(name)
            if name not in sums.tensors:
                # Those of training and of evaluation are apart.
                sums.extend([name, _count(name)])
            totals[name], totals[_count(name)] = 0.0, 0.0
            for value, condition in zip(values, values.conditions, strict=True):
                if not isinstance(value, Tensor):
                    value = torch.full((), value, dtype=torch.float32, device=self.backend.device)
                value = value.detach().float()
                weight = torch.ones_like(value)
                if self.drops_nan_metrics:
                    is_number = ~torch.isnan(value)
                    condition = is_number if condition is None else condition & is_number
                if condition is not None:
                    value, weight = (torch.where(condition, v, torch.zeros_like(v)) for v in (value, weight))
                totals[name] = totals[name] + value
                totals[_count(name)] = totals[_count(name)] + weight
        if isinstance(num_tokens, Tensor):
            totals[NUM_TOKENS] = num_tokens
        sums.add(**totals)

    # ---- Logs ----

    def logged_metrics(self, mode: str) -> dict[str, Tensor]:
        """The sums that a log of `"train"` or `"eval"` reads, by name."""
        if not self._metric_sums:
            return {}
        # An evaluation shows the tokens trained on so far, too.
        return {**self.metric_tensors[mode], NUM_TOKENS: self.metric_tensors["train"][NUM_TOKENS]}

    def take_metrics(self, mode: str, host_sums: dict[str, Tensor]) -> None:
        """Put the means where upstream's `log` looks for them, and start anew. `host_sums` is what `logged_metrics` gave, on the CPU."""
        if not host_sums:
            return
        values = {name: tensor.item() for name, tensor in host_sums.items()}
        self._total_train_tokens += values[NUM_TOKENS]
        names = [name for name in self._metric_names if values.get(_count(name))]
        if mode == "eval" or not names:
            self._metric_sums["train"].reset([NUM_TOKENS])
        if not names:
            return
        self._metric_sums[mode].reset()
        # Upstream's `log` shows the mean of these lists.
        self._kept_metrics[mode].update({name: [values[name] / values[_count(name)]] for name in names})
        if self.drops_nan_metrics:
            # Upstream shows `None` where there was no number.
            self._kept_metrics[mode].update({name: [] for name in self._appended_metrics[mode].difference(names)})
        if self._shows_num_tokens:
            self._kept_metrics[mode][NUM_TOKENS] = [self._total_train_tokens]

    def drop_metrics(self, mode: str) -> None:
        """Forget what the next log of `"train"` or `"eval"` would show."""
        if self._metric_sums:
            # Tokens were trained on, whatever came of the run.
            self._metric_sums[mode].reset({*self._metric_sums[mode].tensors} - {NUM_TOKENS})
        if self._metric_names:
            self._kept_metrics[mode].clear()

    # ---- Checkpoints ----

    def metrics_state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        if not self._metric_names:
            return {}
        pending = self.backend.fetch(self._metric_sums["train"].tensors[NUM_TOKENS]).item() if self._metric_sums else 0
        return {NUM_TOKENS: self._total_train_tokens + pending}

    def load_metrics_state(self, state: dict[str, Any]) -> None:
        """Take up what `metrics_state` gave when the checkpoint was written; empty for one of another trainer."""
        if self._metric_names:
            self._total_train_tokens = state.get(NUM_TOKENS, 0)
        if self._metric_sums:
            self._metric_sums["train"].reset([NUM_TOKENS])


def _count(name: str) -> str:
    return f"{name} (count)"


@cache
def _metrics_of(cls: type[Trainer]) -> frozenset[str]:
    """The metrics that the loss of a trainer class appends, by its source."""
    functions = (function for name in names_of_a_step(cls, ("compute_loss",)) for function in functions_of(cls, name))
    return frozenset(metric for function in functions for metric in metrics_in(syntax_of(function)))


def _without_mode(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call code of the user's outside of [`DeferredReads`], whose line torch_xla would record for that of each of its operators."""
    with _pop_mode_temporarily():
        return function(*args, **kwargs)
