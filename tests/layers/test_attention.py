"""Static masks are the masks that transformers makes, without its reads, and only while they are asked for."""

import pytest
import torch
from transformers import AutoConfig, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from hf_tpu_ext.layers.attention import static_masks


LENGTH = 7
# Two documents and padding; three documents.
SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 0, 0], [1, 1, 2, 3, 3, 3, 3]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]])
FULL = torch.ones(2, LENGTH, dtype=torch.int64)
MAKERS = {
    "causal": create_causal_mask,
    "sliding": create_sliding_window_causal_mask,
    "bidirectional": create_bidirectional_mask,
}


def config(implementation):
    config = AutoConfig.for_model("mistral", sliding_window=3, num_hidden_layers=1)
    config._attn_implementation = implementation
    return config


def make(kind, implementation, attention_mask, position_ids=None, device="cpu"):
    # The name of the fourth, the cache, depends on the version of transformers.
    further = () if kind == "bidirectional" else (None, position_ids)
    return MAKERS[kind](config(implementation), torch.zeros(2, LENGTH, 4, device=device), attention_mask, *further)


def allowed(mask):
    """Which positions are attended to, of a boolean or an additive mask; all of them where there is no mask."""
    if mask is None:
        return torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    return mask if mask.dtype == torch.bool else mask == 0


@pytest.fixture
def pattern():
    """The patterns, written down by hand."""
    query, key = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
    return {
        "causal": key <= query,
        "sliding": (key <= query) & (key > query - 3),
        "bidirectional": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    }


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("attention_mask", [FULL, PADDED], ids=["full", "padded"])
def test_equal_to_upstream(kind, attention_mask, pattern):
    eager, sdpa = make(kind, "eager", attention_mask), make(kind, "sdpa", attention_mask)
    with static_masks():
        static = make(kind, "eager", attention_mask)
    assert static.shape == (2, 1, LENGTH, LENGTH) and static.dtype == torch.float32
    expected = pattern[kind] & attention_mask[:, None, None].bool()
    assert torch.equal(allowed(static), expected)
    assert torch.equal(allowed(static), allowed(eager))
    if sdpa is not None:
        assert torch.equal(allowed(static), sdpa)
    if eager is not None:
        assert torch.equal(static, eager)


@pytest.mark.parametrize("kind", MAKERS)
def test_packed_rows_are_block_diagonal(kind, pattern):
    with static_masks(SEGMENTS):
        static = make(kind, "eager", (SEGMENTS > 0).long())
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None]
    expected = pattern[kind] & same & (SEGMENTS > 0)[:, None, None]
    assert torch.equal(allowed(static), expected)
    assert static.min() == torch.finfo(torch.float32).min


@pytest.mark.parametrize("kind", ["causal", "sliding"])
def test_packed_rows_are_what_upstream_finds_in_restarted_positions(kind):
    segments = torch.tensor([[1, 1, 1, 2, 2, 3, 3], [1, 1, 2, 3, 3, 3, 3]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 0, 1, 2, 3]])
    upstream = make(kind, "eager", None, positions)
    with static_masks(segments):
        static = make(kind, "eager", FULL, positions)
    assert torch.equal(static, upstream)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["plain", "packed"])
def test_nothing_is_read_and_the_data_change_no_program(xla, kind, segments):
    masks = xla.send([FULL, PADDED, FULL * 0])
    segment_ids = None if segments is None else xla.send(segments)
    xla.wait()
    before = xla.counters()
    results = []
    for mask in masks:
        with static_masks(segment_ids):
            results.append(make(kind, "eager", mask, device=xla.device))
        xla.wait()
    spent = xla.counters() - before
    assert (spent.compiles, spent.executions, spent.reads) == (1, 3, 0)
    with static_masks(segments):
        assert torch.equal(xla.fetch(results[1]), make(kind, "eager", PADDED))


def test_mapping_is_left_as_it_was():
    entries, everyone = dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(masking_utils.AttentionMaskInterface._global_mapping)
    with static_masks():
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is not masking_utils.eager_mask
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masking_utils.sdpa_mask
        assert masking_utils.AttentionMaskInterface._global_mapping == everyone
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == entries
    with pytest.raises(KeyboardInterrupt), static_masks(SEGMENTS):
        raise KeyboardInterrupt
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == entries
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is masking_utils.eager_mask
    assert not ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
