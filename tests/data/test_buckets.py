import random
from itertools import combinations

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_tpu_ext.data.buckets import batch_lengths, percentile_buckets, round_up_length, validate_buckets


def padded_size(lengths, buckets):
    return sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)


@pytest.mark.parametrize(
    ("length", "max_length", "expected"),
    [
        (1, 1024, 8),
        (8, 1024, 8),
        (130, 1024, 136),
        (511, 1024, 512),
        (513, 1024, 640),
        (1000, 1000, 1000),
    ],
)
def test_round_up_length(length, max_length, expected):
    assert round_up_length(length, max_length) == expected


def test_buckets_are_distinct_rounded_and_fit_every_length():
    rng = random.Random(0)
    for _ in range(50):
        max_length = rng.choice([64, 500, 1024])
        lengths = [int(rng.lognormvariate(4.5, 1)) + 1 for _ in range(rng.randint(1, 300))]
        num_buckets = rng.randint(1, 6)
        buckets = percentile_buckets(lengths, num_buckets, max_length)
        assert buckets == sorted(set(buckets))
        assert 1 <= len(buckets) <= num_buckets
        assert buckets[-1] == round_up_length(min(max(lengths), max_length), max_length)
        assert all(round_up_length(bucket, max_length) == bucket for bucket in buckets)


def test_buckets_pad_no_more_than_any_other_choice():
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 90) for _ in range(rng.randint(1, 80))]
        candidates = {round_up_length(length, 96) for length in lengths}
        least = min(
            padded_size(lengths, others)
            for others in combinations(sorted(candidates), min(3, len(candidates)))
            if others[-1] == max(candidates)
        )
        assert padded_size(lengths, percentile_buckets(lengths, 3, 96)) == least


def test_buckets_follow_clusters_of_lengths():
    lengths = [20, 30, 40] * 100 + [700] * 10
    assert percentile_buckets(lengths, 2, 1024) == [40, 768]
    assert percentile_buckets([77] * 10, 4, 1024) == [80]


@pytest.mark.parametrize("num_buckets", [0, -1])
def test_number_of_buckets_must_be_positive(num_buckets):
    with pytest.raises(ValueError, match=f"`length_buckets={num_buckets}` is not a number of buckets.*Set"):
        percentile_buckets([1, 2], num_buckets, 8)


def test_batch_lengths_in_the_order_of_the_dataset():
    assert batch_lengths([3, 9, 4, 1, 7], 2, "sequential") == [9, 4, 7]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_batch_lengths_do_not_depend_on_the_order_of_shuffled_rows(strategy):
    rng = random.Random(0)
    lengths = [rng.randint(1, 500) for _ in range(100)]
    assert batch_lengths(rng.sample(lengths, 100), 8, strategy) == batch_lengths(lengths, 8, strategy)


@pytest.mark.parametrize("strategy", ["random", "group_by_length", "sequential"])
def test_batch_lengths_hold_the_longest_row(strategy):
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 500) for _ in range(rng.randint(1, 100))]
        longest = batch_lengths(lengths, 8, strategy)
        assert len(longest) == -(-len(lengths) // 8)
        assert max(longest) == max(lengths)


def test_grouped_batches_are_like_those_of_transformers():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(5, 0.8)) + 1 for _ in range(3000)]
    order = list(LengthGroupedSampler(8, lengths=lengths, generator=torch.Generator().manual_seed(1)))
    upstream = sum(max(lengths[i] for i in order[start : start + 8]) for start in range(0, 3000, 8))
    assert sum(batch_lengths(lengths, 8, "group_by_length")) == pytest.approx(upstream, rel=0.02)


def test_given_buckets_are_sorted_and_distinct():
    assert validate_buckets([64, 16, 64, np.int64(32)], 64) == [16, 32, 64]


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([], "is empty"),
        ([16, 0], "holds 0, but lengths are positive integers"),
        ([-8], "holds -8, but lengths are positive integers"),
        ([16.5], "holds 16.5, but lengths are positive integers"),
        (["16"], "holds '16', but lengths are positive integers"),
        ([16, 128], "a bucket longer than `max_length`: 128 > 64.*set `max_length=128`"),
    ],
)
def test_given_buckets_that_cannot_be(buckets, message):
    with pytest.raises(ValueError, match=f"`length_buckets` .*{message}"):
        validate_buckets(buckets, 64)
