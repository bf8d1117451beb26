"""Lengths to pad batches to, chosen by the data or given by hand."""

from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from torch import Tensor

from ..errors import UserError


def round_up_length(length: int, max_length: int) -> int:
    """
    Rounds a length up to a multiple that the hardware handles well, at most to `max_length`.

    A length below 512 goes up to a multiple of 8 (the rows of a TPU tile) and a longer one to a multiple of
    128 (its columns, and what blockwise attention kernels ask for). Multiples of 128 everywhere would double the cost
    of short rows, whose attention scores, the only tensor with the length in its columns, are small anyway.
    """
    multiple_of = 8 if length < 512 else 128
    return min(-(-length // multiple_of) * multiple_of, max_length)


def group_batches(lengths: Iterable[int], batch_size: int, train_sampling_strategy: str = "random") -> Tensor:
    """
    Groups row lengths into batches as the sampler of the dataloader would, for one fixed shuffle. Of the strategies of
    [`~transformers.TrainingArguments`], `"group_by_length"` and `"sequential"` are told apart, and every other one is
    taken for `"random"`. The result is int64 of shape `(num_batches, batch_size)`; rows that complete the last batch
    have length 0.
    """
    row_lengths = torch.tensor(list(lengths))
    rows = len(row_lengths)
    if train_sampling_strategy != "sequential":
        # Sorted before it is shuffled, so that the same rows in another order give the same buckets, and so the same
        # programs.
        row_lengths = row_lengths.sort().values
        row_lengths = row_lengths[torch.randperm(rows, generator=torch.Generator().manual_seed(0))]
    if train_sampling_strategy == "group_by_length":
        # The rule of transformers' LengthGroupedSampler: sorted within groups of up to 50 batches.
        group = batch_size * max(1, min(rows // (batch_size * 4), 50))
        row_lengths = torch.cat([chunk.sort(descending=True).values for chunk in row_lengths.split(group)])
    return torch.nn.functional.pad(row_lengths, (0, -rows % batch_size)).view(-1, batch_size)


def batch_lengths(lengths: Iterable[int], batch_size: int, train_sampling_strategy: str = "random") -> list[int]:
    """Length of the longest row of each batch that [`group_batches`] makes: what has to fit into a bucket."""
    return group_batches(lengths, batch_size, train_sampling_strategy).amax(1).tolist()


def percentile_buckets(lengths: Iterable[int], num_buckets: int, max_length: int) -> list[int]:
    """
    Chooses bucket lengths from the percentiles of the data.

    Candidates are the 100 percentiles of `lengths`, rounded up by [`round_up_length`]. Of these, the `num_buckets`
    that pad the least are taken (found exactly, by dynamic programming), which evens out what the buckets waste:
    evenly spaced percentiles would leave a long tail of lengths to the last bucket alone.

    A batch goes to the bucket of its longest row, so give the lengths of batches ([`batch_lengths`]) rather than those
    of rows.

    Args:
        lengths (`Iterable[int]`): Lengths that have to fit.
        num_buckets (`int`): Greatest number of buckets. Each one compiles one program.
        max_length (`int`): Greatest length of a bucket; longer lengths count as truncated to it.

    Returns:
        `list[int]`: Distinct bucket lengths, ascending. The last one fits the greatest length.

    Raises:
        `ValueError`: If `num_buckets` is less than 1.
    """
    if num_buckets < 1:
        raise UserError(
            f"`length_buckets={num_buckets}` is not a number of buckets. Set `length_buckets` to 1 or more (4 is a good "
            f"start), to a list of lengths, or leave it out to pad every batch to `max_length`."
        )
    sorted_lengths = torch.tensor(list(lengths)).clamp(max=max_length).sort().values
    last_of_percentile = (torch.arange(1, 101) * len(sorted_lengths) + 99) // 100 - 1
    candidates = sorted({round_up_length(n, max_length) for n in sorted_lengths[last_of_percentile].tolist()})
    fitting = torch.searchsorted(sorted_lengths, torch.tensor(candidates), right=True).tolist()

    # best[j]: least padded size, and its buckets, of all lengths that fit into candidates[j], its last bucket.
    best = [(rows * bucket, [bucket]) for rows, bucket in zip(fitting, candidates, strict=True)]
    for _ in range(num_buckets - 1):
        best = [
            min(
                [best[j]]
                + [(best[i][0] + (fitting[j] - fitting[i]) * bucket, [*best[i][1], bucket]) for i in range(j)],
            )
            for j, bucket in enumerate(candidates)
        ]
    return best[-1][1]


def validate_buckets(buckets: Sequence[int], max_length: int) -> list[int]:
    """Checks bucket lengths that were given by hand; the distinct ones, ascending."""
    example = f"for example `length_buckets={[-(-max_length // 4), -(-max_length // 2), max_length]}`"
    if not buckets:
        raise UserError(f"`length_buckets` is empty. Give at least one length, {example}.")
    for bucket in buckets:
        if not isinstance(bucket, Integral) or bucket <= 0:
            raise UserError(f"`length_buckets` holds {bucket!r}, but lengths are positive integers, {example}.")
        if bucket > max_length:
            raise UserError(
                f"`length_buckets` holds a bucket longer than `max_length`: {bucket} > {max_length}. Rows are truncated "
                f"to `max_length`, so remove the bucket or set `max_length={max(buckets)}`."
            )
    return sorted({int(bucket) for bucket in buckets})
