import random

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_tpu_ext.data import PackedCollator


PAD = 96
MAX_LENGTH = 24


def make_documents(rng, rows, longest):
    documents = []
    for _ in range(rows):
        input_ids = [rng.randrange(96) for _ in range(rng.randint(1, longest))]
        documents.append({"input_ids": input_ids, "labels": [rng.choice([-100, token]) for token in input_ids]})
    return documents


def pack(documents, strategy):
    return pack_dataset(Dataset.from_list(documents), MAX_LENGTH, strategy).to_list()


def unpack(batch):
    """The documents of a batch, as `(tokens, labels, positions)`, found by its segment ids alone."""
    documents = []
    for row in range(len(batch["segment_ids"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            documents.append(tuple(batch[key][row, here].tolist() for key in ("input_ids", "labels", "position_ids")))
    return documents


def expected_fragments(documents, strategy):
    """What TRL makes of documents: `bfd` truncates them, `bfd_split` cuts them, `wrapped` cuts their stream."""
    if strategy == "wrapped":
        documents = [{key: sum((document[key] for document in documents), []) for key in ("input_ids", "labels")}]
    fragments = []
    for document in documents:
        end = MAX_LENGTH if strategy == "bfd" else len(document["input_ids"])
        for start in range(0, min(end, len(document["input_ids"])), MAX_LENGTH):
            tokens = document["input_ids"][start : start + MAX_LENGTH]
            labels = document["labels"][start : start + MAX_LENGTH]
            fragments.append((tokens, [-100, *labels[1:]], list(range(len(tokens)))))
    return fragments


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_documents_are_recovered_from_segment_ids(strategy):
    rng = random.Random(0)
    collator = PackedCollator(PAD, MAX_LENGTH)
    for _ in range(10):
        documents = make_documents(rng, rng.randint(1, 30), 2 * MAX_LENGTH)
        rows = pack(documents, strategy)
        batch = collator(rows)
        assert all(value.shape == (len(rows), MAX_LENGTH) for value in batch.values())
        assert all(value.dtype == torch.int64 for value in batch.values())
        assert sorted(unpack(batch)) == sorted(expected_fragments(documents, strategy))
        pads = batch["segment_ids"] == 0
        assert torch.equal(batch["attention_mask"], (~pads).long())
        assert (batch["input_ids"][pads] == PAD).all()
        assert (batch["labels"][pads] == -100).all()
        assert (batch["position_ids"][pads] == 0).all()


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_tokens_labels_and_positions_are_those_of_trl(strategy):
    rows = pack(make_documents(random.Random(0), 40, 2 * MAX_LENGTH), strategy)
    batch = PackedCollator(PAD, MAX_LENGTH)(rows)
    stock = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True)(rows)
    tokens = batch["segment_ids"] > 0
    for key in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch[key][tokens], stock[key][0])


def test_wrapped_rows_and_rows_without_labels_are_one_document():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    batch = PackedCollator(PAD, 4)(rows)
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100], [-100] * 4]


def test_row_longer_than_max_length():
    with pytest.raises(ValueError, match="row of 5 tokens is longer than 4.*`max_length=5`.*`seq_length=4`"):
        PackedCollator(PAD, 4)([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}])


def token_losses(model, batch, **inputs):
    """Loss of each token, at the token that is predicted, of shape `(batch, length)`; 0 where it does not count."""
    logits = model(input_ids=batch["input_ids"], use_cache=False, **inputs).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return torch.nn.functional.pad(losses, (1, 0))


@torch.no_grad()
def test_losses_of_packed_documents_equal_those_of_separate_ones(tiny_qwen3):
    documents = make_documents(random.Random(0), 12, MAX_LENGTH)
    batch = PackedCollator(PAD, MAX_LENGTH)(pack(documents, "bfd"))
    segments = batch["segment_ids"]
    same_document = segments[:, None, :, None] == segments[:, None, None, :]
    allowed = same_document & torch.ones(MAX_LENGTH, MAX_LENGTH, dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    packed = token_losses(tiny_qwen3, batch, attention_mask=mask, position_ids=batch["position_ids"])

    compared = 0
    for row in range(len(segments)):
        for segment in range(1, segments[row].max() + 1):
            here = segments[row] == segment
            alone = {key: batch[key][row, here][None] for key in ("input_ids", "labels")}
            expected = token_losses(tiny_qwen3, alone)[0]
            torch.testing.assert_close(packed[row, here], expected, rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared == len(documents)
    assert len(segments) < len(documents)
