import random

import pytest
import torch
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_tpu_ext.data.buckets import batch_lengths, percentile_buckets
from hf_tpu_ext.data.padding_report import TokenWaste
from hf_tpu_ext.data.static_shapes import StaticShapeCollator, pad_rows


MAX_LENGTH = 256
BATCH_SIZE = 8


@pytest.fixture(scope="module")
def lengths():
    rng = random.Random(0)
    return [min(MAX_LENGTH, int(rng.lognormvariate(3.5, 0.8)) + 1) for _ in range(1003)]


def measure(lengths, declared, sampler=None, shuffle=False):
    """Share of pads of the batches that the dataloader and the collators really make."""
    collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=0), declared, 0)
    examples = [{"input_ids": [1] * length} for length in lengths]
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        examples, BATCH_SIZE, shuffle=shuffle, sampler=sampler, collate_fn=collator, generator=generator
    )
    batches = [pad_rows(batch, BATCH_SIZE, 0)["attention_mask"] for batch in loader]
    return 1 - sum(batch.sum().item() for batch in batches) / sum(batch.numel() for batch in batches)


def test_small_example_by_hand():
    # Batches (3, 8), (4, 20), (2): padded to 2 x 8, 2 x 32 and 2 x 8.
    waste = TokenWaste([3, 8, 4, 20, 2], [8, 32], 2, "sequential")
    assert (waste.rows, waste.real_tokens, waste.pad_tokens) == (5, 37, 59)
    assert waste.pad_share == 59 / 96
    assert waste.pad_share_per_length == {8: 19 / 32, 32: 40 / 64}
    assert "5 rows, 37 tokens: 61% of the tokens computed are padding (8: 59%, 32: 62%)" in waste.describe()


def test_longer_rows_count_as_truncated():
    waste = TokenWaste([100, 100], [64], 2)
    assert (waste.real_tokens, waste.pad_tokens) == (128, 0)


@pytest.mark.parametrize("declared", [[256], [32, 64, 128, 256]])
def test_share_is_that_of_real_batches(lengths, declared):
    assert TokenWaste(lengths, declared, BATCH_SIZE, "sequential").pad_share == pytest.approx(
        measure(lengths, declared)
    )
    random_share = TokenWaste(lengths, declared, BATCH_SIZE).pad_share
    assert random_share == pytest.approx(measure(lengths, declared, shuffle=True), abs=0.02)


def test_estimates_are_what_the_settings_give(lengths):
    estimates = TokenWaste(lengths, [MAX_LENGTH], BATCH_SIZE).estimates()
    buckets = percentile_buckets(batch_lengths(lengths, BATCH_SIZE), 4, MAX_LENGTH)
    measured = measure(lengths, buckets, shuffle=True)
    assert estimates["`length_buckets=4`"] == pytest.approx(measured, abs=0.02)

    buckets = percentile_buckets(batch_lengths(lengths, BATCH_SIZE, "group_by_length"), 4, MAX_LENGTH)
    sampler = LengthGroupedSampler(BATCH_SIZE, lengths=lengths, generator=torch.Generator().manual_seed(1))
    grouped = estimates['`length_buckets=4` with `train_sampling_strategy="group_by_length"`']
    assert grouped == pytest.approx(measure(lengths, buckets, sampler), abs=0.02)


def test_one_setting_is_advised():
    rng = random.Random(0)
    lengths = [rng.randint(20, 390) for _ in range(800)]
    text = TokenWaste(lengths, [1024], 4).describe()
    # By itself, buckets leave more than 5 % more.
    assert 'Set `length_buckets=4` with `train_sampling_strategy="group_by_length"` (estimated' in text
    assert text.count("length_buckets") == 1 and "\n" not in text
    assert text.endswith("to compile; rows of similar length share batches, which changes training).")
    # A declared length that no batch is padded to is as good as absent.
    assert "Set `length_buckets=4` with" in TokenWaste(lengths, [392, 1024], 4).describe()
    # The sampler in use already groups by length: it is not advised again.
    grouped = TokenWaste(lengths, [1024], 4, "group_by_length").describe()
    assert "`length_buckets=4` (estimated" in grouped
    assert "train_sampling_strategy" not in grouped


def test_buckets_that_no_batch_is_padded_to_are_named():
    # Batches of 8, 20 and 2 tokens, and by length of 20, 4 and 2.
    waste = TokenWaste([3, 8, 4, 20, 2], [4, 8, 32, 64], 2, "sequential")
    assert waste.describe_unused([8, 32]) is None
    assert waste.describe_unused([64, 8, 16]) == (
        "length_buckets: no batch is padded to 16 or 64, since the longest rows of batches have 2 to 20 tokens"
    )
    waste = TokenWaste([60, 61, 30, 62] * 8, [32, 64], 4, "sequential")
    assert 'have 62 tokens. train_sampling_strategy="group_by_length"' in waste.describe_unused([32, 64])


def test_batches_of_similar_rows_are_not_advised_where_they_save_nothing():
    # One batch of three rows, whatever is set.
    text = TokenWaste([5, 9, 30], [64], 8).describe()
    assert text.endswith("padding. Set `length_buckets=4` (estimated 83%; each length is a graph to compile).")
    accumulated = TokenWaste([5, 9, 30], [64], 8, accumulates=True).describe()
    assert accumulated == text.replace("is a graph", "is two graphs")


def test_pads_of_a_tokenizer_are_counted():
    waste = TokenWaste([64] * 16, [64], 8, token_share=0.25)
    assert (waste.real_tokens, waste.pad_share, waste.pad_share_per_length) == (256, 0.75, {64: 0.75})
    assert "75% of the tokens computed are padding. The rows came padded: with padding=False" in waste.describe()


@pytest.mark.parametrize(
    ("lengths", "options"), [([60, 64] * 8, {}), ([16] * 16, {"packing": True})], ids=["few pads", "packed"]
)
def test_no_advice(lengths, options):
    assert "Set" not in TokenWaste(lengths, [64], 8, **options).describe()
