import pickle
import random
from copy import copy
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_tpu_ext.data.packing import PackedCollator
from hf_tpu_ext.data.static_shapes import (
    ShapeGuard,
    StaticShapeCollator,
    count_all,
    count_not_padding,
    count_rows,
    pad_rows,
)


PAD = 96


def make_examples(rng, rows, longest):
    examples = []
    for _ in range(rows):
        input_ids = [rng.randrange(96) for _ in range(rng.randint(2, longest))]
        examples.append({"input_ids": input_ids, "labels": [rng.choice([-100, token]) for token in input_ids]})
    return examples


def returns(batch):
    return lambda examples: batch


@pytest.mark.parametrize("lengths", [[32], [32, 8, 16]])
def test_batches_are_those_of_trl_padded_to_the_smallest_declared_length(lengths):
    rng = random.Random(0)
    stock = DataCollatorForLanguageModeling(pad_token_id=PAD, return_position_ids=True)
    collator = StaticShapeCollator(stock, lengths, PAD)
    seen = set()
    for _ in range(50):
        examples = make_examples(rng, rng.randint(1, 4), rng.choice([4, 8, 9, 16, 32]))
        expected, batch = stock(examples), collator(examples)
        length = expected["input_ids"].shape[1]
        target = min(declared for declared in lengths if declared >= length)
        seen.add(target)
        assert batch.keys() == expected.keys()
        for key, value in batch.items():
            assert value.shape == (len(examples), target)
            assert value.dtype == expected[key].dtype
            assert torch.equal(value[:, :length], expected[key])
            assert (value[:, length:] == (PAD if key == "input_ids" else -100 if key == "labels" else 0)).all()
    assert seen == set(lengths)


def test_only_tensors_of_batch_and_length_are_padded():
    batch = BatchEncoding(
        {
            "input_ids": torch.tensor([[1, 2], [3, 4]]),
            "teacher_logits": torch.ones(2, 2, 5, dtype=torch.bfloat16),
            "labels": torch.ones(2, 2),
            "weight": torch.ones(2),
            "temperature": torch.tensor(2.0),
            "texts": ["a", "b"],
        }
    )
    padded = StaticShapeCollator(returns(batch), [4], PAD)([])
    assert padded["input_ids"].tolist() == [[1, 2, PAD, PAD], [3, 4, PAD, PAD]]
    assert padded["teacher_logits"].shape == (2, 4, 5)
    assert padded["teacher_logits"].dtype == torch.bfloat16
    assert not padded["teacher_logits"][:, 2:].any()
    for key in ("labels", "weight", "temperature", "texts"):
        assert padded[key] is batch[key]
    assert "attention_mask" not in padded


def test_columns_of_a_pair_are_padded_as_those_of_one_sequence():
    """Labels of -100 beside `chosen_input_ids`, too: 0 would be a token that is trained on."""
    batch = {
        f"{prefix}{name}": torch.ones(2, length, dtype=torch.long)
        for prefix, length in {"chosen_": 2, "rejected_": 3}.items()
        for name in ("input_ids", "attention_mask", "labels")
    }
    padded = StaticShapeCollator(returns(batch), [4], PAD)([])
    for key, value in padded.items():
        expected = PAD if key.endswith("input_ids") else -100 if key.endswith("labels") else 0
        assert value[0].tolist() == [1] * batch[key].shape[1] + [expected] * (4 - batch[key].shape[1])


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 2), (3, 3)])
def test_two_sequences_of_a_row_have_one_length(first, second):
    """Each length is one shape, whichever of the two is longer."""
    batch = {
        f"{prefix}{name}": torch.ones(2, length, dtype=torch.long)
        for prefix, length in {"": first, "KL_": second}.items()
        for name in ("input_ids", "attention_mask")
    }
    padded = StaticShapeCollator(returns(batch), [4, 8], PAD)([])
    length = 8 if max(first, second) > 4 else 4
    assert {value.shape for value in padded.values()} == {(2, length)}
    for key, value in padded.items():
        tokens = batch[key].shape[1]
        assert (value[:, :tokens] == 1).all()
        assert (value[:, tokens:] == (PAD if key.endswith("input_ids") else 0)).all()


def test_batch_longer_than_every_declared_length():
    collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=PAD), [4, 8], PAD)
    with pytest.raises(ValueError, match=r"9 tokens .* greatest declared length 8.*`max_length=8`.*\[4, 8, 9\]"):
        collator([{"input_ids": list(range(9))}])


def test_collator_survives_pickling_for_dataloader_workers():
    collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=PAD), [8], PAD)
    examples = make_examples(random.Random(0), 4, 8)
    copied = DataLoader(examples, batch_size=2, collate_fn=pickle.loads(pickle.dumps(collator)))
    for batch, expected in zip(copied, DataLoader(examples, batch_size=2, collate_fn=collator), strict=True):
        assert all(torch.equal(batch[key], expected[key]) for key in expected)


def test_completed_rows_are_masked_out():
    batch = {
        "input_ids": torch.tensor([[1, 2, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "position_ids": torch.tensor([[0, 1, 2]]),
        "labels": torch.tensor([[1, 2, -100]]),
        "teacher_logits": torch.ones(1, 3, 5),
        "class_weights": torch.ones(7),
        "temperature": torch.tensor(2.0),
        "texts": ["a"],
    }
    completed = pad_rows(batch, 3, PAD)
    assert completed["input_ids"].tolist() == [[1, 2, PAD], [PAD] * 3, [PAD] * 3]
    assert completed["attention_mask"].tolist() == [[1, 1, 0], [0] * 3, [0] * 3]
    assert completed["position_ids"].tolist() == [[0, 1, 2], [0] * 3, [0] * 3]
    assert completed["labels"].tolist() == [[1, 2, -100], [-100] * 3, [-100] * 3]
    assert completed["teacher_logits"].shape == (3, 3, 5)
    for key in ("class_weights", "temperature", "texts"):
        assert completed[key] is batch[key]
    assert batch["input_ids"].shape == (1, 3)
    # As `DataCollatorForSeq2Seq` gives data without labels.
    completed = pad_rows({**batch, "labels": None}, 3, PAD)
    assert completed["input_ids"].tolist() == [[1, 2, PAD], [PAD] * 3, [PAD] * 3] and completed["labels"] is None


def test_a_row_with_a_class_is_completed_by_rows_like_it_and_a_full_batch_is_returned_as_it_is():
    """What a model makes of a row without tokens may not be finite, a mean over them for instance."""
    ids, mask = torch.tensor([[1, 2], [3, PAD]]), torch.tensor([[1, 1], [1, 0]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 0])}
    completed = pad_rows(batch, 4, PAD)
    assert completed["labels"].tolist() == [1, 0, -100, -100]
    assert completed["input_ids"].tolist() == [[1, 2], [3, PAD], [3, PAD], [3, PAD]]
    assert completed["attention_mask"].tolist() == [[1, 1], [1, 0], [1, 0], [1, 0]]
    assert pad_rows(batch, 2, PAD) is batch


@pytest.mark.parametrize(("count", "found"), [(count_all, 6), (partial(count_not_padding, PAD), 5)])
def test_tokens_are_counted_and_rows_measured_before_they_are_padded(count, found):
    stock = DataCollatorForLanguageModeling(pad_token_id=PAD)
    batch = StaticShapeCollator(stock, [8], PAD, count_tokens=count)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert (batch.num_tokens, batch.length) == (found, 3) and batch["input_ids"].shape == (2, 8)
    # As it comes from a worker of the dataloader, and from pinned memory.
    for sent in (pickle.loads(pickle.dumps(batch)), copy(batch)):
        assert (sent.num_tokens, sent.length) == (found, 3) and sent.keys() == batch.keys()
    packed = PackedCollator(PAD, 8, count)([{"input_ids": [1, 2, 3, 4], "seq_lengths": [3, 1]}])
    assert (packed.num_tokens, packed.length) == (4, 4)


def test_tokens_are_counted_before_a_mask_is_added():
    ids = torch.tensor([[1, 2, 3], [4, 5, PAD]])
    collator = StaticShapeCollator(lambda _: {"input_ids": ids}, [8], PAD, None, partial(count_not_padding, PAD), True)
    batch = collator([])
    assert batch.num_tokens == 5
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2


def test_errors_name_the_class_of_the_setting():
    collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=PAD), [4], PAD, "TPUTrainingArguments")
    with pytest.raises(ValueError, match=r"TPUTrainingArguments\(max_length=6\).*length_buckets=\[4, 6\]"):
        collator([{"input_ids": [1] * 6}])
    guard = ShapeGuard(1, [], "TPUTrainingArguments")
    guard.check(batch_of(4, 8))
    with pytest.raises(ValueError, match=r"`TPUTrainingArguments\(max_length=...\)`"):
        guard.check(batch_of(4, 9))


def test_the_order_of_columns_is_no_shape():
    guard, ids, mask = ShapeGuard(1, []), torch.ones(2, 3), torch.ones(2, 4)
    guard.check({"ids": ids, "mask": mask})
    guard.check({"mask": mask, "ids": ids})
    with pytest.raises(ValueError, match="`mask` was"):
        guard.check({"mask": ids, "ids": ids})


def test_loss_and_gradients_equal_those_of_the_ragged_batch(tiny_qwen3):
    rng = random.Random(0)
    stock = DataCollatorForLanguageModeling(pad_token_id=PAD)
    collator = StaticShapeCollator(stock, [16, 32], PAD)
    for _ in range(2):
        examples = make_examples(rng, 3, 20)
        losses, gradients = [], []
        for batch in (stock(examples), pad_rows(collator(examples), 4, PAD)):
            tiny_qwen3.zero_grad()
            loss = tiny_qwen3(**batch).loss
            loss.backward()
            losses.append(loss)
            gradients.append([parameter.grad for parameter in tiny_qwen3.parameters()])
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


def batch_of(rows, length, **others):
    return {"input_ids": torch.zeros(rows, length), "labels": torch.zeros(rows, length), **others}


def test_guard_allows_the_declared_number_of_shapes():
    guard = ShapeGuard(2, [8, 16])
    for length in (8, 16, 16, 8):
        guard.check(batch_of(4, length, texts=["a"] * length))


def test_guard_names_the_first_undeclared_length():
    guard = ShapeGuard(2, [8, 16])
    guard.check(batch_of(4, 8))
    guard.check(batch_of(4, 16))
    with pytest.raises(
        ValueError, match=r"`input_ids` was \(4, 8\) .* is \(4, 9\) now .*`max_length=16`.*`length_buckets"
    ):
        guard.check(batch_of(4, 9))


def test_guard_asks_a_loader_of_ones_own_to_pad():
    """A declared length would change nothing: its batches are taken as they are."""
    guard = ShapeGuard(1, [16])
    guard.check(batch_of(4, 8), of_own_loader=True)
    with pytest.raises(
        ValueError, match=r"Pad `input_ids` in the data collator to a fixed length \(`max_length=16`\): "
    ) as told:
        guard.check(batch_of(4, 9), of_own_loader=True)
    assert "declare the length" not in str(told.value)


def test_guard_names_the_key_that_varies():
    guard = ShapeGuard(2, [8, 16])
    guard.check(batch_of(4, 8, spans=torch.zeros(4, 3)))
    guard.check(batch_of(4, 16, spans=torch.zeros(4, 3)))
    with pytest.raises(
        ValueError, match=r"`spans` was \(4, 3\) .* is \(4, 2\) now .*Pad `spans` in the data collator"
    ):
        guard.check(batch_of(4, 16, spans=torch.zeros(4, 2)))


def test_guard_names_a_key_that_comes_or_goes():
    guard = ShapeGuard(1, [8])
    guard.check(batch_of(4, 8))
    with pytest.raises(ValueError, match=r"`spans` was absent .* is \(4, 3\) now.*same keys in every batch: `spans`"):
        guard.check(batch_of(4, 8, spans=torch.zeros(4, 3)))


def test_guard_tells_a_ragged_last_batch_apart():
    guard = ShapeGuard(1, [8])
    guard.check(batch_of(4, 8))
    with pytest.raises(ValueError, match=r"`input_ids` was \(4, 8\) .* is \(3, 8\) now .*`dataloader_drop_last=True`"):
        guard.check(batch_of(3, 8))


def test_a_batch_without_tensors_is_refused():
    """The end of an iterator would be taken for that of the data, and the run would end there."""
    with pytest.raises(ValueError, match="gives no tensors \\(input_ids\\).*return tensors of PyTorch"):
        count_rows({"input_ids": [[1, 2], [3, 4]]})
