"""How much of a run is spent on padding, and what to set against it."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .buckets import group_batches, percentile_buckets


_ADVISED_BUCKETS = 4
_ADVICE_FROM = 0.10
# What buckets must save, in share of pads, to be named, and batches of similar rows over others.
_WORTHWHILE = 0.05
_BY_LENGTH = "group_by_length"


class TokenWaste:
    """
    Token waste of a run: rows, tokens and pads, overall and per declared length.

    Batches are formed as the sampler would for one fixed shuffle, each is padded to the smallest declared length that
    fits its longest row, and the last one is completed with pad rows; all of these pads are counted.

    Args:
        lengths (`Iterable[int]`):
            Length of each row of the training set, in its order; longer rows than the greatest declared length count as
            truncated to it. With `packing`, of each packed row.
        declared_lengths (`Sequence[int]`): Declared lengths, the greatest of which is `max_length`.
        batch_size (`int`): Rows of one batch, over all devices that share a batch shape.
        train_sampling_strategy (`str`, *optional*, defaults to `"random"`): As in [`~transformers.TrainingArguments`].
        packing (`bool`, *optional*): Whether rows are packed already: nothing is advised then.
        token_share (`float`, *optional*, defaults to 1.0): Share of the tokens of rows that are no pads of a tokenizer.
        accumulates (`bool`, *optional*, defaults to `False`): Whether gradients are accumulated, for which each length has two graphs.

    Attributes:
        rows (`int`): Number of rows.
        real_tokens (`int`): Number of tokens without pads.
        pad_tokens (`int`): Number of pads, those of the rows that complete the last batch included.
        pad_share (`float`): `pad_tokens` over all tokens computed.
        pad_share_per_length (`dict[int, float]`): The same for the batches of each declared length that occurs.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        declared_lengths: Sequence[int],
        batch_size: int,
        train_sampling_strategy: str = "random",
        packing: bool | None = False,
        token_share: float = 1.0,
        accumulates: bool = False,
    ):
        self.declared_lengths = sorted(declared_lengths)
        self.batch_size = batch_size
        self.train_sampling_strategy = train_sampling_strategy
        self.packing = packing
        self._lengths = [min(length, self.declared_lengths[-1]) for length in lengths]
        self.rows = len(self._lengths)
        self._token_share, self._accumulates = token_share, accumulates
        self.real_tokens = round(token_share * sum(self._lengths))

        self._batches = group_batches(self._lengths, batch_size, train_sampling_strategy)
        padded_lengths = _padded_lengths(self._batches, self.declared_lengths)
        self.pad_tokens = self._pad_tokens(self._batches, padded_lengths)
        self.pad_share = self.pad_tokens / (self.pad_tokens + self.real_tokens)
        self.pad_share_per_length = {}
        for length in padded_lengths.unique().tolist():
            has_length = padded_lengths == length
            pads = self._pad_tokens(self._batches[has_length], padded_lengths[has_length])
            self.pad_share_per_length[length] = pads / (has_length.sum().item() * batch_size * length)

    def describe(self) -> str:
        """Words for the start of a run: the share of pads and, from 10 % on, what lowers it."""
        text = (
            f"{self.rows:,} rows, {self.real_tokens:,} tokens: {self.pad_share:.0%} of the tokens computed are padding"
        )
        if len(self.pad_share_per_length) > 1:
            text += f" ({', '.join(f'{length}: {share:.0%}' for length, share in self.pad_share_per_length.items())})"
        advice, least = "", self.pad_share
        if not self.packing and self.pad_share >= _ADVICE_FROM:
            for option, share in self.estimates().items():
                if share <= least - _WORTHWHILE:
                    order = (
                        "; rows of similar length share batches, which changes training"
                        if _BY_LENGTH in option
                        else ""
                    )
                    graphs = "two graphs" if self._accumulates else "a graph"
                    advice = f" Set {option} (estimated {share:.0%}; each length is {graphs} to compile{order})."
                    least = share
            if self._token_share <= 1 - _WORTHWHILE:
                advice += " The rows came padded: with padding=False, the tokenizer leaves that to the data collator, which may add less."
        return f"{text}.{advice}"

    def describe_unused(self, buckets: Sequence[int]) -> str | None:
        """Name those of `buckets` that no batch is padded to, and why; `None` where there are none."""
        unused_buckets = sorted({*buckets} - self.pad_share_per_length.keys())
        if not unused_buckets:
            return None
        longest = self._batches.amax(1)
        between = " to ".join(dict.fromkeys((str(longest.min().item()), str(longest.max().item()))))
        text = (
            f"length_buckets: no batch is padded to {' or '.join(map(str, unused_buckets))}, since the longest rows of batches have "
            f"{between} tokens"
        )
        longest_in_groups = group_batches(self._lengths, self.batch_size, _BY_LENGTH).amax(1)
        if longest_in_groups.min() <= unused_buckets[-1] < longest.min():
            text += f'. train_sampling_strategy="{_BY_LENGTH}" makes batches of rows of similar length'
        return text

    def estimates(self) -> dict[str, float]:
        """Share of pads that buckets would leave, with the sampler in use and with one that groups rows by length."""
        estimates = {}
        num_buckets = max(len(self.pad_share_per_length), _ADVISED_BUCKETS)
        for strategy in dict.fromkeys([self.train_sampling_strategy, _BY_LENGTH]):
            batches = group_batches(self._lengths, self.batch_size, strategy)
            buckets = percentile_buckets(batches.amax(1).tolist(), num_buckets, self.declared_lengths[-1])
            pads = self._pad_tokens(batches, _padded_lengths(batches, buckets))
            option = f"`length_buckets={num_buckets}`"
            if strategy != self.train_sampling_strategy:
                option += f' with `train_sampling_strategy="{strategy}"`'
            estimates[option] = pads / (pads + self.real_tokens)
        return estimates

    def _pad_tokens(self, batches: Tensor, padded_lengths: Tensor) -> int:
        return (padded_lengths.sum() * batches.shape[1]).item() - round(self._token_share * batches.sum().item())


def _padded_lengths(batches: Tensor, declared_lengths: Sequence[int]) -> Tensor:
    """Declared length that each batch is padded to, of shape `(num_batches,)`."""
    declared_lengths = torch.tensor(declared_lengths)
    return declared_lengths[torch.bucketize(batches.amax(1), declared_lengths)]
