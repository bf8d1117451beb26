"""Numbers that depend on the longest row of a batch are upstream's, whatever length the batch is padded to."""

import inspect
import math
import re
from functools import partial

import pytest
import torch
from datasets import Dataset
from fixes import assert_fixes, refusal
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BigBirdConfig,
    BigBirdForMaskedLM,
    DataCollatorForSeq2Seq,
    FNetConfig,
    FNetForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LongT5Config,
    LongT5ForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from trl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig, SFTConfig

from hf_tpu_ext import (
    TPUDPOTrainer,
    TPUGRPOTrainer,
    TPUKTOTrainer,
    TPUSFTConfig,
    TPUSFTTrainer,
    TPUTrainer,
    TPUTrainingArguments,
)
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.layers.batch_length import BatchLength, _depends_on_length


# Up to 16 tokens frequencies stay as they are. Long rows first, short ones after them, and longer ones than ever.
UNSCALED = 16
LENGTHS = [6, 7, 40, 9, 20, 6, 12, 7, 33, 8, 5, 9, 47, 30, 6, 8]
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=UNSCALED, rope_parameters=rope, **SHAPE))


def longrope():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + index for index in range(8)],
    }
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    # The configuration copies its own to the parameters, whatever they say.
    positions = {"max_position_embeddings": 128, "original_max_position_embeddings": UNSCALED}
    return Phi3ForCausalLM(Phi3Config(rope_parameters=rope, **positions, **dropouts, **SHAPE))


ROPES = [dynamic, longrope]


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def rows_of(lengths):
    rows = [[3 + (7 * row + 5 * place) % 60 for place in range(length)] for row, length in enumerate(lengths)]
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in rows])


def arguments(cls, directory, is_stock, **config):
    defaults = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": len(LENGTHS) // 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "train_sampling_strategy": "sequential",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": is_stock,
    }
    return cls(str(directory), **{**defaults, **config})


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def pad_with(tokenizer, **padding):
    return DataCollatorForSeq2Seq(tokenizer, **padding)


@pytest.mark.parametrize("make", ROPES, ids=lambda make: make.__name__)
def test_frequencies_are_those_of_the_longest_row(runs, make, xla):
    """Also after longer batches, which upstream remembers; and in evaluation, and that all of it is one program."""

    def train(cls, is_stock):
        args = arguments(TrainingArguments, runs.output_dir, is_stock)
        collator = pad_with(runs.tokenizer)
        rows, held = rows_of(LENGTHS), rows_of([5, 30, 6, 6])
        trainer = cls(seeded(make), args, collator, train_dataset=rows, eval_dataset=held)
        if not is_stock:
            assert trainer.by_length.rope_scaling == (make.__name__, UNSCALED)
        trainer.train()
        return trainer, losses(trainer), trainer.evaluate()["eval_loss"]

    before = xla.counters()
    ours, mine, evaluated = train(TPUTrainer, False)
    spent = xla.counters() - before
    _, theirs, expected = train(Trainer, True)
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert ours.steps.why_traced is None and ours.watch.recompiles == 0
    assert len(ours.watch.programs) == 2 and spent.fallbacks == 0
    assert not any("forward" in vars(module) for module in ours.model.modules())


@pytest.mark.parametrize("make", ROPES, ids=lambda make: make.__name__)
def test_rows_of_several_documents_have_the_frequencies_of_the_longest(runs, make):
    settings = {"max_length": 64, "packing": True, "max_steps": 2}
    tokens = rows_of([30, 9, 8, 7, 6, 28, 5, 12, 9]).remove_columns("labels")

    def train(cls, is_stock):
        args = arguments(SFTConfig, runs.output_dir, is_stock, per_device_train_batch_size=1, **settings)
        trainer = cls(seeded(make), args, train_dataset=tokens, processing_class=runs.tokenizer)
        trainer.train()
        return losses(trainer)

    packed = train(TPUSFTTrainer, False)
    model = seeded(make).train()
    rows = TPUSFTTrainer(
        seeded(make), arguments(SFTConfig, runs.output_dir, False, per_device_train_batch_size=1, **settings),
        train_dataset=tokens, processing_class=runs.tokenizer,
    ).train_dataset  # fmt: skip
    ids, documents = rows[0]["input_ids"], rows[0]["seq_lengths"]
    longest, total, count, start = max(documents), 0.0, 0, 0
    # Upstream's model notes the length of the first batch that it sees.
    model.model.rotary_emb(torch.zeros(1), torch.tensor([[longest - 1]]))
    frequencies = model.model.rotary_emb.inv_freq.clone()
    for length in documents:
        document = torch.tensor([ids[start : start + length]])
        rope = model.model.rotary_emb
        rope.forward = lambda x, position_ids, rope=rope: inspect.unwrap(type(rope).forward)(rope, x, position_ids)
        rope.inv_freq = frequencies
        with torch.no_grad():
            total += float(model(input_ids=document, labels=document).loss) * (length - 1)
        count, start = count + length - 1, start + length
    assert packed[0] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.ci
def test_preferences_have_the_frequencies_of_their_rows(runs):
    """Of the policy and of the reference."""
    pairs = [
        {"prompt": "ab" * n, "chosen": "cd" * m, "rejected": "e"} for n, m in [(2, 3), (9, 9), (1, 2), (2, 2)] * 2
    ]

    def train(cls, is_stock):
        args = arguments(DPOConfig, runs.output_dir, is_stock, max_length=64, max_steps=4)
        model, reference = seeded(lambda: resized(dynamic(), runs)), seeded(lambda: resized(dynamic(), runs), 1)
        trainer = cls(model, reference, args, train_dataset=Dataset.from_list(pairs), processing_class=runs.tokenizer)
        trainer.train()
        return losses(trainer)

    assert train(TPUDPOTrainer, False) == pytest.approx(train(DPOTrainer, True), rel=1e-5)


@pytest.mark.ci
def test_two_sequences_in_a_batch_have_no_one_length(runs):
    """KTO's loss has those of the completions and those of its estimate of the divergence."""
    pairs = [{"prompt": "ab" * n, "completion": "cd" * m, "label": n > 3} for n, m in [(2, 1), (5, 1), (1, 2), (4, 2)]]

    def train(max_length):
        args = arguments(KTOConfig, runs.output_dir, False, max_length=max_length, max_steps=1)
        model, reference = resized(dynamic(), runs), resized(dynamic(), runs)
        trainer = TPUKTOTrainer(
            model, reference, args, train_dataset=Dataset.from_list(pairs), processing_class=runs.tokenizer
        )
        trainer.train()

    settings = {"max_length": 48}
    assert "which is not known where a batch has input_ids and KL_input_ids" in refusal(train, settings)
    assert_fixes(train, settings, "max_length=16")


@pytest.mark.ci
def test_a_teacher_has_the_frequencies_of_a_students_rows(runs, distil, same_logs, tmp_path):
    seeded(lambda: resized(dynamic(), runs)).save_pretrained(tmp_path / "teacher")
    runs.tokenizer.save_pretrained(tmp_path / "teacher")
    config = {"kd_teacher": str(tmp_path / "teacher"), "per_device_train_batch_size": 2, "max_steps": 6}
    same_logs(distil(**config), distil("cpu", **config))


def resized(model, runs):
    model.resize_token_embeddings(len(runs.tokenizer))
    return model


@pytest.mark.ci
def test_text_that_a_model_writes_has_no_known_length(runs):
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 16}
    rows = Dataset.from_list([{"prompt": "a prompt"}] * 4)

    def make(length, **rope):
        args = arguments(GRPOConfig, runs.output_dir, False, **settings | {"max_completion_length": length})
        model = dynamic()
        model.config.rope_parameters |= rope
        model = resized(LlamaForCausalLM(model.config), runs)
        return TPUGRPOTrainer(
            model, lambda completions, **_: [0.0] * len(completions), args=args, train_dataset=rows,
            processing_class=runs.tokenizer,
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"rope_type='dynamic'.*Keep to 16 tokens.*max_completion_length.*yarn"):
        make(16)
    # The fixes that it names.
    make(16, rope_type="yarn")
    trainer = make(4)
    trainer.train()
    assert trainer.by_length.rope_scaling is None


@pytest.mark.ci
@pytest.mark.parametrize("make", ROPES, ids=lambda make: make.__name__)
def test_text_in_a_run_has_frequencies_of_short_texts(runs, make):
    """Beside rows that are longer. It is refused before the run where texts may become so, too."""
    rows = Dataset.from_list([{"prompt": "ab", "completion": "c" * count} for count in (40, 9, 30, 20)])

    def train(**config):
        args = arguments(TPUSFTConfig, runs.output_dir, False, **{"max_length": 64, "max_steps": 1, **config})
        trainer = TPUSFTTrainer(
            resized(seeded(make), runs), args, train_dataset=rows, eval_dataset=rows, processing_class=runs.tokenizer,
            compute_metrics=len,
        )  # fmt: skip
        trainer.add_callback(Writes())
        trainer.train()

    class Writes(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            ids = torch.tensor([[5, 6, 7]])
            settings = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            assert torch.equal(model.generate(ids, **settings), expected)

    ids = torch.tensor([[5, 6, 7]])
    model = resized(seeded(make), runs)
    model.generation_config.eos_token_id = runs.tokenizer.eos_token_id
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    train()
    settings = {"max_length": 12, "predict_with_generate": True, "generation_max_new_tokens": 6}
    assert "up to 6 tokens after the prompt of a row" in refusal(train, settings)
    assert_fixes(train, settings, "max_length=10")


def test_types_that_depend_on_the_length_are_known():
    """Of those that upstream has, each with a batch of other lengths than it was made for."""
    source = inspect.getsource(inspect.getmodule(ROPE_INIT_FUNCTIONS["dynamic"]).dynamic_rope_update)
    asked = {kind for kind in ROPE_INIT_FUNCTIONS if _depends_on_length(kind)}
    assert asked == {"dynamic", "longrope"}
    assert source.count("rope_type ==") + source.count("in rope_type") == 2, (
        "upstream has another type that depends on it"
    )


@torch.no_grad()
@pytest.mark.parametrize("length", [4, 9])
def test_noise_is_as_large_as_upstreams(length):
    """`alpha / sqrt(length * width)`, of the length that upstream's collator gives a batch."""
    embedding = nn.Embedding(8, 16)
    embedding.weight.zero_()
    embedding.neftune_noise_alpha = 3.0
    lengths = BatchLength([], None)
    lengths.replace_noise(embedding.register_forward_hook(lambda *_: None))
    largest = 3.0 / math.sqrt(length * 16)
    for sent in ({}, lengths.data(length)):
        assert lengths.take({"input_ids": 1, **sent}) == {"input_ids": 1}
        noise = embedding(torch.zeros(64, 24, dtype=torch.int64)).abs()
        bound = largest if sent else 3.0 / math.sqrt(24 * 16)
        assert 0.99 * bound < noise.max() <= bound
        assert noise.mean() == pytest.approx(bound / 2, rel=0.02)
    assert torch.equal(embedding.eval()(torch.zeros(1, 2, dtype=torch.int64)), torch.zeros(1, 2, 16))


def test_noise_in_training_is_by_the_longest_row_of_a_batch(runs, monkeypatch):
    seen = []
    data = BatchLength.data
    monkeypatch.setattr(BatchLength, "data", lambda self, length, *_: seen.append(length) or data(self, length))
    args = arguments(TrainingArguments, runs.output_dir, False, neftune_noise_alpha=5.0)
    trainer = TPUTrainer(
        seeded(dynamic), args, pad_with(runs.tokenizer), train_dataset=rows_of([6, 7, 9, 8, 5, 5] * 3)
    )
    trainer.train()
    assert seen[:3] == [7, 9, 5]
    assert trainer.steps.why_traced is None and trainer.watch.recompiles == 0
    # Only training adds noise, and asks for a length.
    assert not trainer.by_length.asks


# ---- Tables ----


def test_rows_are_not_padded_beyond_the_positions_of_a_model(runs):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = BertConfig(vocab_size=259, max_position_embeddings=13, **shape, **dropouts)
    ids = rows_of([9, 12, 11, 13])["input_ids"]
    rows = Dataset.from_list([{"input_ids": row, "labels": index % 2} for index, row in enumerate(ids)])

    def train(cls, is_stock):
        args = arguments(TrainingArguments, runs.output_dir, is_stock, max_steps=2)
        model = seeded(lambda: BertForSequenceClassification(config))
        trainer = cls(model, args, train_dataset=rows, processing_class=runs.tokenizer)
        trainer.train()
        return losses(trainer)

    assert train(TPUTrainer, False) == pytest.approx(train(Trainer, True), rel=1e-5)


def test_the_pad_token_is_that_of_the_model_where_there_is_no_tokenizer(runs):
    """By which a model finds the last token of a row."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, pad_token_id=7, num_labels=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0

    def collate(examples):
        longest = max(len(example["input_ids"]) for example in examples)
        ids = [example["input_ids"] + [7] * (longest - len(example["input_ids"])) for example in examples]
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": torch.tensor(ids), "attention_mask": (torch.tensor(ids) != 7).long(), "labels": labels}

    ids = [[token if token != 7 else 8 for token in row] for row in rows_of([9, 12, 11, 10])["input_ids"]]
    rows = Dataset.from_list([{"input_ids": row, "labels": index % 2} for index, row in enumerate(ids)])

    def train(cls, is_stock):
        args = arguments(TrainingArguments, runs.output_dir, is_stock, max_steps=2)
        trainer = cls(seeded(lambda: GPT2ForSequenceClassification(config)), args, collate, train_dataset=rows)
        trainer.train()
        return losses(trainer)

    assert train(TPUTrainer, False) == pytest.approx(train(Trainer, True), rel=1e-5)


@pytest.mark.ci
def test_models_that_see_padding_take_rows_of_one_length(runs):
    """The fix of the message, tried."""
    sizes = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    config = FNetConfig(**sizes, hidden_dropout_prob=0.0, use_tpu_fourier_optimizations=False)

    def train(cls, lengths, **padding):
        args = arguments(TrainingArguments, runs.output_dir, cls is Trainer, max_steps=2)
        collate = pad_with(runs.tokenizer, **padding)
        trainer = cls(seeded(lambda: FNetForMaskedLM(config)), args, collate, train_dataset=rows_of(lengths))
        trainer.train()
        return losses(trainer)

    message = refusal(lambda lengths: train(TPUTrainer, lengths), {"lengths": [9, 4]})
    assert "9 tokens a row is padded to 16" in message and "FNetForMaskedLM sees padding" in message
    words = re.search(r"(padding='max_length', max_length=\d+)", message).group(1)
    padding = eval(f"dict({words})")
    stock = train(Trainer, [9, 4], **padding)
    assert train(TPUTrainer, [9, 4], **padding) == pytest.approx(stock, rel=1e-5)


# ---- Attention in blocks ----


def big_bird(**config):
    """Of a row of up to 28 tokens, all see all."""
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    blocks = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    return BigBirdForMaskedLM(BigBirdConfig(max_position_embeddings=64, **dropouts, **SHAPE, **(blocks | config)))


def long_t5(**config):
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    blocks = {"local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"}
    sizes = {"vocab_size": 259, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return LongT5ForConditionalGeneration(LongT5Config(dropout_rate=0.0, **sizes, **tokens, **(blocks | config)))


def losses_of_rows(runs, cls, make, lengths, declared=None, **collator):
    args_cls = TrainingArguments if declared is None else TPUTrainingArguments
    settings = {"max_steps": len(lengths) // 2} | ({} if declared is None else {"max_length": declared})
    args = arguments(args_cls, runs.output_dir, cls is Trainer, **settings)
    collate = DataCollatorForSeq2Seq(runs.tokenizer, **collator)
    trainer = cls(seeded(make), args, collate, train_dataset=rows_of(lengths), processing_class=runs.tokenizer)
    trainer.train()
    return losses(trainer)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("make", "lengths"),
    [
        pytest.param(big_bird, [40, 40, 40, 40], marks=pytest.mark.slow),
        (partial(big_bird, attention_type="original_full"), [31, 40, 9, 12]),
        (long_t5, [31, 40, 3, 2, 14, 12]),
        pytest.param(partial(long_t5, encoder_attention_type="local"), [31, 40, 3, 2, 14, 12], marks=pytest.mark.slow),
    ],
    ids=["one length", "full", "global blocks", "local blocks"],
)
def test_attention_in_blocks(runs, make, lengths):
    mine, theirs = (losses_of_rows(runs, cls, make, lengths) for cls in (TPUTrainer, Trainer))
    assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.ci
def test_columns_that_block_sparse_attention_sees_are_refused(runs):
    with pytest.raises(UserError, match="33 tokens a row is padded to 40, and the block-sparse attention") as refusal:
        losses_of_rows(runs, TPUTrainer, big_bird, [40, 40, 33, 12])
    # The fixes that it names; the first is tested above.
    fixes = [
        "attention_type='original_full'",
        "padding='max_length', max_length=40",
        "TPUTrainingArguments(max_length=28)",
    ]
    assert all(fix in str(refusal.value) for fix in fixes)
    padded = {"padding": "max_length", "max_length": 40}
    mine, theirs = (losses_of_rows(runs, cls, big_bird, [40, 40, 33, 12], **padded) for cls in (TPUTrainer, Trainer))
    assert mine == pytest.approx(theirs, rel=1e-5)
    # The full attention that it has switched to, it keeps.
    mine, theirs = (
        losses_of_rows(runs, cls, big_bird, [20, 28, 9, 12], declared)
        for cls, declared in ((TPUTrainer, 28), (Trainer, None))
    )
    assert mine == pytest.approx(theirs, rel=1e-5)
