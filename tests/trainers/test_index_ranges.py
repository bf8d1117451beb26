"""Places outside of a model's tables are errors with row, value, table and fix, where eager PyTorch has an IndexError."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from refusals import refused
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LayoutLMConfig,
    LayoutLMForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    TrOCRForCausalLM,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
    XLMConfig,
    XLMWithLMHeadModel,
)
from trl import DPOConfig, GRPOConfig, SFTConfig

from hf_tpu_ext import TPUDPOTrainer, TPUGRPOTrainer, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.data.static_shapes import CollatedBatch
from hf_tpu_ext.trainers import TPUGRPOConfig
from hf_tpu_ext.trainers.run.index_ranges import IndexRanges


SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
}
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 1, "attention_heads": 2}.items()
}
SIDES |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 50}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def with_lora():
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=8))


def opt():
    sizes = {**SIZES, "ffn_dim": 16, "word_embed_proj_dim": 16}
    del sizes["intermediate_size"]
    return OPTForCausalLM(OPTConfig(max_position_embeddings=8, **sizes))


def bert(cls=BertForSequenceClassification, **settings):
    return cls(BertConfig(max_position_embeddings=8, **{"num_labels": 2, **SIZES, **settings}))


def roberta():
    return RobertaForMaskedLM(RobertaConfig(max_position_embeddings=10, **SIZES))


def t5():
    return T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    )


def bart():
    return BartForConditionalGeneration(BartConfig(max_position_embeddings=8, **SIDES))


def marian():
    return MarianMTModel(
        MarianConfig(
            max_position_embeddings=8, pad_token_id=0, decoder_start_token_id=0, scale_embedding=False, **SIDES
        )
    )


def tokens(length=6, rows=4, last=49):
    ids = torch.arange(rows * length).reshape(rows, length) % 40 + 5
    ids[2, 3] = last
    return ids


def batch_of(length=6, labels=None, **others):
    ids = tokens(length)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids if labels is None else labels,
        **others,
    }


def marked(values, value, row=2, column=3):
    values = values.clone()
    values[(row, column) if values.ndim == 2 else row] = value
    return values


def layoutlm():
    return LayoutLMForTokenClassification(LayoutLMConfig(max_2d_position_embeddings=1001, num_labels=50, **SIZES))


def xlm():
    return XLMWithLMHeadModel(
        XLMConfig(emb_dim=16, n_layers=1, n_heads=2, vocab_size=50, n_langs=2, use_lang_emb=True)
    )


def trocr():
    sizes = {**SIZES, "hidden_size": 16}
    del sizes["vocab_size"]
    encoder = ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes))
    decoder = TrOCRForCausalLM(
        TrOCRConfig(
            vocab_size=50,
            d_model=16,
            decoder_layers=1,
            decoder_attention_heads=2,
            decoder_ffn_dim=16,
            cross_attention_hidden_size=16,
        )
    )
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


def videomae():
    sizes = {**SIZES, "image_size": 16, "patch_size": 8, "num_frames": 2, "tubelet_size": 1}
    del sizes["vocab_size"]
    return VideoMAEForVideoClassification(VideoMAEConfig(num_labels=3, **sizes))


def segformer():
    sizes = {
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "decoder_hidden_size": 8,
        "num_attention_heads": [1, 1, 1, 1],
    }
    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=3, **sizes))


IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 1, 0])
CHOICES = {"input_ids": tokens(9).view(4, 3, 3), "attention_mask": torch.ones(4, 3, 3, dtype=torch.int64)}
# A model, a batch that is in range to the last place, one that is not, and what is said about it.
CASES = {
    "token": (llama, batch_of(), batch_of(input_ids=tokens(last=50)), ["Row 2", "token id 50", "`input_ids`", "has 50 rows", "resize_token_embeddings"]),
    "negative token": (llama, batch_of(), batch_of(input_ids=tokens(last=-1)), ["Row 2", "token id -1", "0 to 49"]),
    "adapter": (with_lora, batch_of(), batch_of(input_ids=tokens(last=50)), ["Row 2", "token id 50"]),
    "label": (llama, batch_of(labels=marked(tokens(), -100)), batch_of(labels=marked(tokens(), 50)), ["Row 2", "label 50", "50 tokens", "-100"]),
    "negative label": (llama, batch_of(), batch_of(labels=marked(tokens(), -2)), ["Row 2", "label -2", "-100"]),
    "class": (bert, batch_of(labels=CLASSES), batch_of(labels=marked(CLASSES, 2)), ["Row 2", "label 2", "2 classes", "num_labels"]),
    "negative class": (bert, batch_of(labels=marked(CLASSES, -100)), batch_of(labels=marked(CLASSES, -1)), ["Row 2", "label -1"]),
    "class of a token": (
        partial(bert, BertForTokenClassification, num_labels=3),
        batch_of(labels=marked(tokens() % 3, -100)),
        batch_of(labels=marked(tokens() % 3, 3)),
        ["Row 2", "label 3", "3 classes"],
    ),
    "choice": (
        partial(bert, BertForMultipleChoice),
        {**CHOICES, "labels": torch.tensor([0, 1, 2, 0])},
        {**CHOICES, "labels": torch.tensor([0, 1, 3, 0])},
        ["Row 2", "label 3", "3 choices"],
    ),
    "token type": (
        bert,
        batch_of(labels=CLASSES, token_type_ids=tokens() % 2),
        batch_of(labels=CLASSES, token_type_ids=marked(tokens() % 2, 2)),
        ["Row 2", "token type 2", "`token_type_ids`", "type_vocab_size"],
    ),
    "coordinate": (
        layoutlm,
        batch_of(labels=tokens(), bbox=torch.full((4, 6, 4), 1000)),
        batch_of(labels=tokens(), bbox=marked(torch.full((4, 6, 4), 1000), torch.tensor([0, 0, 1500, 1500]))),
        ["Row 2", "coordinate 1500", "`bbox`", "0 to 1000", "int(1000 * x / width)"],
    ),
    "language": (
        xlm,
        batch_of(langs=tokens() % 2),
        batch_of(langs=marked(tokens() % 2, 9)),
        ["Row 2", "language 9", "`langs`", "n_langs"],
    ),
    "label of a decoder beside images": (
        trocr,
        {"pixel_values": IMAGES, "labels": marked(tokens(), -100)},
        {"pixel_values": IMAGES, "labels": marked(tokens(), 50)},
        ["Row 2", "label 50", "50 rows"],
    ),
    "class of a video": (
        videomae,
        {"pixel_values": IMAGES[:, None].expand(-1, 2, -1, -1, -1), "labels": torch.tensor([0, 2, 1, 0])},
        {"pixel_values": IMAGES[:, None].expand(-1, 2, -1, -1, -1), "labels": torch.tensor([0, 2, 3, 0])},
        ["Row 2", "label 3", "3 classes"],
    ),
    "class of a pixel": (
        segformer,
        {"pixel_values": IMAGES.repeat(1, 1, 4, 4), "labels": torch.tensor([2, 255]).repeat(4, 64, 32)},
        {"pixel_values": IMAGES.repeat(1, 1, 4, 4), "labels": torch.full((4, 64, 64), 3)},
        ["Row 0", "label 3", "3 classes", "with 255"],
    ),
    "position": (
        gpt2,
        batch_of(position_ids=marked(tokens() % 8, 7)),
        batch_of(position_ids=marked(tokens() % 8, 8)),
        ["Row 2", "position 8", "wpe"],
    ),
    "length": (gpt2, batch_of(8), batch_of(9), ["Row 0", "9 tokens", "positions for 8 (wpe)", "max_length=8"]),
    "length of OPT": (opt, batch_of(8), batch_of(9), ["9 tokens", "embed_positions", "max_length=8"]),
    "length of BERT": (bert, batch_of(8, labels=CLASSES), batch_of(9, labels=CLASSES), ["9 tokens", "position_embeddings"]),
    "length of RoBERTa": (roberta, batch_of(8), batch_of(9), ["9 tokens", "positions for 8 (position_embeddings)"]),
    "length of BART": (bart, batch_of(8), batch_of(9, labels=tokens(4)), ["9 tokens", "embed_positions"]),
    "labels of BART": (bart, batch_of(8), batch_of(4, labels=tokens(9)), ["9 tokens", "embed_positions"]),
    "length of Marian": (marian, batch_of(8), batch_of(9, labels=tokens(4)), ["9 tokens", "embed_positions"]),
    "token of an encoder": (t5, batch_of(), batch_of(input_ids=tokens(last=50)), ["Row 2", "token id 50"]),
    "token of a decoder": (
        t5,
        batch_of(decoder_input_ids=tokens()),
        batch_of(decoder_input_ids=tokens(last=50)),
        ["Row 2", "token id 50", "`decoder_input_ids`"],
    ),
    "label of a decoder": (t5, batch_of(), batch_of(labels=marked(tokens(), 50)), ["Row 2", "label 50"]),
}  # fmt: skip


def forward(model, batch):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base(**batch).loss


@pytest.mark.parametrize("name", CASES)
def test_what_upstream_refuses_on_the_cpu_is_refused(name):
    make, inside, outside, words = CASES[name]
    model = make()
    ranges = IndexRanges(model, labels=True)
    # In the model's own tables all goes well.
    assert forward(model, inside).isfinite()
    ranges.check(inside)
    with pytest.raises((IndexError, RuntimeError)):
        forward(model, outside)
    # What was padded by this package is not looked at.
    refused(words, lambda: ranges.check(CollatedBatch(outside, next(iter(outside.values())).shape[1], {}, 4)))


def test_what_a_collator_of_this_package_adds_is_not_looked_at():
    """A pad token without a row in the embedding, and more columns than positions: masked, and in stock not there."""
    ids = nn.functional.pad(tokens(6), (0, 10), value=50)
    batch = {"input_ids": ids, "attention_mask": (ids != 50).long()}
    for make in (llama, gpt2, opt):
        IndexRanges(make(), labels=True).check(CollatedBatch(batch, 6, dict.fromkeys(batch, (1, 6)), 4))
        with pytest.raises(ValueError, match="token id 50"):
            IndexRanges(make(), labels=True).check(batch)


def test_where_a_table_is_not_known_nothing_is_refused():
    class Own(LlamaForCausalLM):
        """Looks for the remainder of a token."""

        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids % 50, **kwargs)

    class Module(nn.Module):
        def forward(self, input_ids):
            return input_ids

    outside = batch_of(input_ids=tokens(last=70))
    hooked = llama()
    hooked.model.embed_tokens.register_forward_pre_hook(lambda _, args: (args[0] % 50,))
    for model in (Own(LlamaConfig(**SIZES)), Module(), hooked):
        IndexRanges(model, labels=False).check(outside)
    # A loss of the user's may take labels for anything; regression and several classes at once do.
    IndexRanges(llama(), labels=False).check(batch_of(labels=marked(tokens(), 500)))
    IndexRanges(bert(num_labels=1), labels=True).check(batch_of(labels=torch.tensor([3, -5, 7, 9])))
    IndexRanges(bert(problem_type="multi_label_classification"), labels=True).check(batch_of(labels=torch.ones(4, 2)))


def rows_of(*values, length=6):
    return Dataset.from_list([{"input_ids": [value] * length, "labels": [value] * length} for value in values])


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_a_trainer_refuses_before_it_compiles(xla, tmp_path, mode):
    args = TPUTrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, report_to="none", run_report=False
    )
    bad = rows_of(5, 6, 7, 50)
    trainer = TPUTrainer(llama(), args, train_dataset=bad, eval_dataset=bad)
    before = trainer.backend.counters().compiles
    run = {"train": trainer.train, "evaluate": trainer.evaluate, "predict": partial(trainer.predict, bad)}[mode]
    with pytest.raises(ValueError, match=r"Row \d of the batch holds the token id 50 in `input_ids`"):
        run()
    assert trainer.backend.counters().compiles - before <= 2


@pytest.mark.slow
@pytest.mark.parametrize("chips", ["2", "8"])
def test_several_chips_refuse_too(chips):
    """Training and evaluation, SFT, DPO and its reference."""
    chosen = "refuses_before_it_compiles or (every_trainer_refuses and not grpo)"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", chosen],
        env={**os.environ, "CPU_NUM_DEVICES": chips},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert "7 passed" in result.stdout


def make_online(cls, config_cls, runs, columns, **settings):
    """A trainer of a model that lacks the rows of the last tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
    model.resize_token_embeddings(40)
    args = config_cls(
        str(runs.output_dir),
        per_device_train_batch_size=2,
        max_steps=1,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    others = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if cls is TPUGRPOTrainer else {}
    rows = Dataset.from_list([columns] * 4)
    return cls(model, args=args, processing_class=runs.tokenizer, train_dataset=rows, **others)


@pytest.mark.parametrize(
    ("cls", "config_cls", "columns", "settings"),
    [
        (TPUSFTTrainer, SFTConfig, {"text": "tokens of letters"}, {"max_length": 32}),
        (TPUSFTTrainer, SFTConfig, {"text": "tokens of letters"}, {"max_length": 32, "packing": True}),
        (TPUDPOTrainer, DPOConfig, {"prompt": "a", "chosen": "letters", "rejected": "b"}, {"max_length": 32}),
        (
            TPUDPOTrainer,
            DPOConfig,
            {"prompt": "a", "chosen": "letters", "rejected": "b"},
            {"max_length": 32, "precompute_ref_log_probs": True},
        ),
        (TPUGRPOTrainer, GRPOConfig, {"prompt": "letters"}, {"num_generations": 2, "max_completion_length": 4}),
    ],
    ids=["sft", "packed", "dpo", "reference", "grpo"],
)
def test_every_trainer_refuses(runs, cls, config_cls, columns, settings):
    # Completions are of prompts, which are no batch yet.
    what = "Prompt 0" if cls is TPUGRPOTrainer else "Row \\d of the batch"
    where = "" if cls is TPUGRPOTrainer else " in `\\w+_ids`"
    with pytest.raises(ValueError, match=rf"{what} holds the token id \d+{where}, .*has 40 rows"):
        make_online(cls, config_cls, runs, columns, **settings).train()


@pytest.fixture
def train_gpt2(runs, xla):
    """Trains GPT-2 by GRPO for a step: its positions are columns, of which it has 20."""

    def train(prompts, reward=lambda completions, **_: [0.0] * len(completions), **settings):
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20, "vocab_size": len(runs.tokenizer)}
        args = TPUGRPOConfig(
            str(runs.output_dir),
            per_device_train_batch_size=2,
            num_generations=2,
            max_steps=1,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        TPUGRPOTrainer(
            GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=runs.tokenizer.eos_token_id)),
            reward_funcs=reward,
            args=args,
            processing_class=runs.tokenizer,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        ).train()

    return train


@pytest.mark.ci
def test_learned_positions_of_completions(train_gpt2):
    """Upstream pads prompts to the longest of a batch, XLA to that of all data: columns, and so positions, would be others."""
    refused(
        [
            "GPT2LMHeadModel takes the column of a token for its position (wpe)",
            "keep to prompts of one length",
            "use_cpu=True",
        ],
        lambda: train_gpt2(["1+2=", "11+2="] * 2, max_completion_length=4),
    )
    refused(
        ["A prompt has up to 4 tokens, and a completion 17", "GPT2LMHeadModel has positions for 20"],
        lambda: train_gpt2(["1+2="] * 4, max_completion_length=17),
    )
    train_gpt2(["1+2="] * 4, max_completion_length=16)


def test_positions_of_a_reward_model(runs, train_gpt2):
    """A row of it may be longer than what it has positions for, in which eager PyTorch has an IndexError."""
    judge = BertForSequenceClassification(
        BertConfig(
            **SIZES | {"vocab_size": len(runs.tokenizer)}, max_position_embeddings=12, num_labels=1, pad_token_id=0
        )
    )
    judge.config._name_or_path = str(runs.model_dir)
    refused(
        [
            "but the reward model has positions for 12 (position_embeddings)",
            "until a prompt and its completion have 12 tokens",
        ],
        lambda: train_gpt2(["1+2="] * 4, reward=judge, max_completion_length=16),
    )


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 1, 2, 2]], ids=["outside", "inside"])
def test_labels_of_a_loss_of_ones_own_get_a_line(xla, tmp_path, caplog, labels):
    """XLA's cross-entropy leaves such a row out. The loss may take labels for something else, so it trains."""

    def weighted(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs.logits, labels, weight=torch.ones(3, device=labels.device))

    rows = [{"input_ids": [5] * 6, "labels": label} for label in labels]
    args = TPUTrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to="none", run_report=False
    )
    model = bert(num_labels=3)
    TPUTrainer(model, args, train_dataset=Dataset.from_list(rows), compute_loss_func=weighted).train()
    line = "holds the label 3 in `labels`, but the model has 3 classes: 0 to 2. "
    assert (
        caplog.text.count(line)
        == caplog.text.count("Your own loss may take labels for something else")
        == (3 in labels)
    )
