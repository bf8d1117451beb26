"""What cannot work is refused with the fix, before anything is compiled; and the caller's arguments are not touched."""

import copy
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from refusals import refused
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPTQConfig,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.data import StaticShapeCollator
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.installing import install_command


QUESTIONS = Dataset.from_list([{"question": "a?", "answer": "b"}] * 4)
GPTQ = GPTQConfig(bits=4)


# ---- Settings ----


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(max_length=None), ["max_length=None", "max_length=1024"]),
        (dict(length_buckets=[16, 64]), ["longer than `max_length`", "64 > 48", "max_length=64"]),
        (dict(length_buckets=[-16, 40]), ["-16", "length_buckets=["]),
        (dict(length_buckets=[4], streaming=True), ["length_buckets=4", "streaming", "length_buckets=[12, 24, 48]"]),
        (dict(max_steps=-1, streaming=True), ["max_steps=-1", "a stream", "max_steps=1000"]),
        (dict(fp16=True), ["fp16=True", "bf16=True and fp16=False"]),
        (dict(optim="ademamix_8bit"), ["optim=ademamix_8bit", "adamw_torch", "adafactor"]),
        (dict(optim="lion_8bit"), ["optim=lion_8bit", "adamw_torch"]),
        (dict(gradient_checkpointing_kwargs={"selective": True}), ["selective", "Leave it out"]),
        (dict(show_samples=2, kwargs={"eval_dataset": None}), ["show_samples=2", "eval_dataset", "eval_strategy"]),
        (dict(show_samples=-1), ["show_samples=-1", "or leave it out"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_setting(runs, config, words):
    if config.pop("streaming", False):
        config["kwargs"] = {"train_dataset": runs.train_dataset.to_iterable_dataset()}
    refused(words, lambda: runs.ours(config_cls=TPUSFTConfig, train=False, **config))


def test_deepspeed(runs):
    config = runs.config()
    # Upstream asks for the package as soon as it is given.
    config.deepspeed = "zero3.json"
    refused(["deepspeed", "Leave it out"], lambda: runs.trainer(TPUSFTTrainer, config))


@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_variable_that_turns_weights_into_bfloat16(runs, variable, monkeypatch):
    monkeypatch.setenv(variable, "1")
    refused([f"{variable}=1", "Unset it", "bf16=True"], lambda: runs.ours(train=False))


@pytest.mark.parametrize("config_cls", [TPUSFTConfig, TPUTrainingArguments])
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("cuda", ["'cuda'", "torch.cuda.is_available()", "'auto'", "'cpu'"]),
        ("tpu", ["'tpu'", "torch_tpu", install_command("torch_tpu")]),
        ("rocm", ["'rocm'", "auto, tpu, xla, cuda, cpu"]),
    ],
)
def test_backend_that_is_absent(config_cls, backend, words, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(words, lambda: config_cls(str(tmp_path), backend=backend))


def test_optimizer_of_weights_that_are_not_trained(runs):
    model, another = (AutoModelForCausalLM.from_pretrained(runs.model_dir) for _ in range(2))
    optimizers = (torch.optim.SGD(another.parameters(), lr=0.25), None)
    refused(
        ["optimizer_cls_and_kwargs=(SGD, {'lr': 0.25,", "create_optimizer", "create_scheduler"],
        lambda: runs.ours(model=model, train=False, kwargs={"optimizers": optimizers}),
    )


def test_output_directory_that_cannot_be_written_to(runs, tmp_path):
    (tmp_path / "file").write_text("")
    output_dir = str(tmp_path / "file" / "run")
    refused([f"output_dir={output_dir!r}", "Set output_dir"], lambda: runs.ours(output_dir=output_dir, train=False))


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (dict(optim="ademamix_8bit"), {}, "optim=ademamix_8bit"),
        (dict(show_samples=2), {"eval_dataset": None}, "show_samples=2"),
        (dict(per_device_train_batch_size=0), {}, "per_device_train_batch_size=0"),
    ],
    ids=["arguments", "after upstream's part", "before it"],
)
def test_what_is_refused_leaves_no_directory(runs, tmp_path, config, kwargs, message):
    config = {**config, "output_dir": str(tmp_path / "a" / "b"), "train": False, "config_cls": TPUSFTConfig}
    for kept in (False, True):
        if kept:
            (tmp_path / "a" / "b").mkdir(parents=True)
        with pytest.raises(ValueError, match=message):
            runs.ours(**config, kwargs=kwargs)
        assert (tmp_path / "a").exists() == kept
    runs.ours(output_dir=str(tmp_path / "c"), train=False)
    assert (tmp_path / "c").is_dir()


def test_what_xla_refuses_an_eager_device_takes(runs):
    trainer = runs.ours(
        config_cls=TPUSFTConfig,
        backend="cpu",
        max_length=None,
        optim="adamw_torch_fused",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=1,
    )
    assert trainer.backend.name == "cpu" and trainer.state.log_history[-1]["train_loss"] > 0


# ---- Quantized weights ----


QUANTIZED = ["quantized by gptq", "bitsandbytes", "load_in_4bit", "unquantized name"]


def test_quantization_in_the_config(runs):
    config = runs.config(model_init_kwargs={"quantization_config": GPTQ})
    refused(QUANTIZED, lambda: runs.trainer(TPUSFTTrainer, config, model=str(runs.model_dir)))


def test_quantization_as_an_argument(runs):
    refused(
        QUANTIZED,
        lambda: runs.trainer(
            TPUSFTTrainer, runs.config(), model=str(runs.model_dir), quantization_config=GPTQ, lora={}
        ),
    )


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_model_that_was_loaded_quantized(runs, lora):
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir)
    # What transformers notes on a model that it loads with kernels that this machine has not.
    model.is_quantized, model.hf_quantizer = True, SimpleNamespace(quantization_config=GPTQ)
    given = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if lora else model
    refused(QUANTIZED, lambda: runs.trainer(TPUSFTTrainer, runs.config(), model=given))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


# ---- Datasets ----


def as_is(dataset):
    return dataset


def as_stream(dataset):
    return dataset.to_iterable_dataset()


def as_stream_without_columns(dataset):
    return dataset.to_iterable_dataset().map(lambda row: row)


@pytest.mark.parametrize("form", [as_is, as_stream, as_stream_without_columns])
def test_no_column_to_train_on(runs, form):
    words = ["train_dataset", "'question', 'answer'", "'text'", "'messages'", "dataset_text_field", "formatting_func"]
    refused(words, lambda: runs.ours(train=False, kwargs={"train_dataset": form(QUESTIONS)}))


@pytest.mark.parametrize("role", ["asistant", "Assistant"])
@pytest.mark.parametrize("more", [{}, {"tags": ["a", 1]}], ids=["struct", "json"])
def test_a_role_with_a_typing_error(runs, role, more):
    """Templates write any role: what it says would be no answer to learn."""
    rows = [[{"role": "user", "content": "a"}, {"role": said, "content": "b", **more}] for said in ("assistant", role)]
    data = Dataset.from_list([{"messages": row} for row in rows], on_mixed_types="use_json")
    refused(
        [f"Row 1 of train_dataset (the first is row 0): a message has the role {role!r} (did you mean 'assistant'?)."],
        lambda: runs.ours(train=False, kwargs={"train_dataset": data}),
    )
    runs.ours(train=False, kwargs={"train_dataset": data.select([0])})


def test_text_in_place_of_a_number(runs):
    refused(
        ["learning_rate='1e-2' is text", "learning_rate=1e-2"], lambda: runs.ours(train=False, learning_rate="1e-2")
    )
    refused(
        ["max_steps='twenty' is text", "for example max_steps=1."], lambda: runs.ours(train=False, max_steps="twenty")
    )


def test_a_model_that_is_not_there(runs, tmp_path):
    (tmp_path / "model").mkdir()
    args = runs.config(SFTConfig)
    refused(
        ["there is no such directory", f"Did you mean '{tmp_path / 'model'}'?"],
        lambda: TPUSFTTrainer(str(tmp_path / "modle"), args, train_dataset=runs.train_dataset),
    )
    (tmp_path / "model" / "config.json").write_text((runs.model_dir / "config.json").read_text())
    refused(
        ["a model's config.json, and no tokenizer", "processing_class=AutoTokenizer.from_pretrained(...)"],
        lambda: TPUSFTTrainer(str(tmp_path / "model"), args, train_dataset=runs.train_dataset),
    )


def test_a_column_with_a_typing_error(runs):
    data = Dataset.from_list([{"mesages": [{"role": "user", "content": "a"}]}])
    words = ["Did you mean 'messages'?", "Rename the column 'mesages' to 'messages'"]
    refused(words, lambda: runs.ours(train=False, kwargs={"train_dataset": data}))


@pytest.mark.parametrize(
    ("eval_dataset", "name"), [(QUESTIONS, "eval_dataset has"), ({"short": QUESTIONS}, "eval_dataset['short'] has")]
)
def test_no_column_to_evaluate_on(runs, eval_dataset, name):
    refused([name, "dataset_text_field"], lambda: runs.ours(train=False, kwargs={"eval_dataset": eval_dataset}))


@pytest.mark.parametrize("args", [None, TrainingArguments], ids=["none", "TrainingArguments"])
@pytest.mark.parametrize(
    ("dataset", "words"),
    [(QUESTIONS, ["'question', 'answer'", "'text'"]), (QUESTIONS.select([]), ["train_dataset is empty"])],
    ids=["columns", "empty"],
)
def test_datasets_are_checked_whatever_the_arguments(runs, tmp_path, args, dataset, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = args and args(str(tmp_path), report_to="none")
    refused(words, lambda: TPUSFTTrainer(str(runs.model_dir), args, train_dataset=dataset))


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "ab"}, {"text": None}], ["Row 1 of train_dataset", "'text' is None", "dataset.filter"]),
        ([{"messages": MESSAGES}, {"messages": None}], ["Row 1 of train_dataset", "'messages' is None"]),
        (
            [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}],
            ["Row 1 of train_dataset", "'completion' is None"],
        ),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [None, 2]}],
            ["Row 1 of train_dataset", "'labels' has None in it", "None not in row['labels']"],
        ),
    ],
    ids=["text", "messages", "completion", "labels"],
)
def test_rows_without_a_value(runs, rows, words):
    dataset = Dataset.from_list(rows)
    refused(words, lambda: runs.ours(train=False, kwargs={"train_dataset": dataset}))
    # Rows that were left out, and columns that are not trained on.
    runs.ours(train=False, kwargs={"train_dataset": dataset.select([0, 0])})
    whole = Dataset.from_list([rows[0] | {"source": None}] * 2)
    runs.ours(train=False, kwargs={"train_dataset": whole})


def test_all_rows_with_mistakes_are_named(runs):
    mistyped, without = (
        [MESSAGES[0], {"role": "asistant", "content": "b"}],
        [MESSAGES[0], {**MESSAGES[1], "content": None}],
    )
    dataset = Dataset.from_dict({"messages": [MESSAGES, without, mistyped, None, None, mistyped]})
    words = [
        "Rows 2, 5 of train_dataset (the first is row 0): a message has the role 'asistant'",
        "Also rows 3, 4: 'messages' is None.",
        "Row 2 begins {'messages': [{",
        "Correct this in the file, or, in Python, leave such rows out with dataset.filter.",
    ]
    refused(words, lambda: runs.ours(train=False, kwargs={"train_dataset": dataset}))


def test_a_text_in_place_of_messages_is_named(runs, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": value}) + "\n" for value in (MESSAGES, "Hello", MESSAGES)))
    dataset = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path))
    words = ["Row 1 of the train dataset", "'messages' is 'Hello', expected a list of messages"]
    refused(words, lambda: runs.ours(train=False, kwargs={"train_dataset": dataset}, assistant_only_loss=True))


def test_messages_with_the_keys_of_sharegpt_are_for_the_users_function(runs):
    dataset = Dataset.from_dict({"messages": [[{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]] * 4})
    kwargs = {"train_dataset": dataset, "eval_dataset": None}
    words = [
        "'messages' in train_dataset have the keys 'from' and 'value'",
        "dataset.map(trl.maybe_convert_to_chatml)",
    ]
    refused(words, lambda: runs.ours(train=False, kwargs=kwargs))
    trainer = runs.ours(train=False, kwargs={**kwargs, "formatting_func": lambda row: row["messages"][1]["value"]})
    assert len(trainer.train_dataset) == 4
    # Upstream trains on the prompts and completions.
    both = runs.train_dataset.select(range(4)).add_column("messages", dataset["messages"])
    assert len(runs.ours(train=False, kwargs={**kwargs, "train_dataset": both}).train_dataset) == 4


def test_conversations_beside_a_text_are_left_alone(runs):
    """Upstream knows them by other keys, and trains on the text."""
    dataset = Dataset.from_dict(
        {"text": ["a b"] * 2, "conversations": [[*MESSAGES[:1], {**MESSAGES[1], "content": ""}]] * 2}
    )
    kwargs = {"train_dataset": dataset, "eval_dataset": None}
    trainer = runs.ours(train=False, kwargs=kwargs)
    stock = runs.trainer(SFTTrainer, runs.config(use_cpu=True), **kwargs)
    assert trainer.train_dataset["input_ids"][:] == stock.train_dataset["input_ids"][:]
    assert not any("an empty answer" in line for line in trainer.adapted.changes)


def test_half_of_prompt_and_completion_is_not_enough(runs):
    dataset = QUESTIONS.rename_column("question", "prompt")
    refused(["'prompt', 'answer'"], lambda: runs.ours(train=False, kwargs={"train_dataset": dataset}))


def test_other_text_columns_can_be_named(runs):
    def prepared(dataset=QUESTIONS, kwargs=None, **config):
        trainer = runs.ours(
            train=False, kwargs={"train_dataset": dataset, "eval_dataset": None} | (kwargs or {}), **config
        )
        return trainer.train_dataset[0]["input_ids"]

    assert prepared(dataset_text_field="question") == prepared(kwargs={"formatting_func": lambda row: row["question"]})
    tokens = Dataset.from_list([{"tokens": [1, 2]}] * 4)
    assert prepared(tokens.rename_column("tokens", "input_ids")) == [1, 2]


def empty_stream():
    return QUESTIONS.rename_column("answer", "text").to_iterable_dataset().filter(lambda row: False)


def test_data_of_which_preparation_leaves_no_row(runs):
    """Upstream drops rows whose labels are all cut off."""
    rows = Dataset.from_list([{"prompt": "a long question?", "completion": " yes"}] * 4)
    refused(
        ["No row of train_dataset is left", "max_length=8", "Set a greater max_length"],
        lambda: runs.ours(train=False, max_length=8, kwargs={"train_dataset": rows}),
    )


@pytest.mark.parametrize("empty", [QUESTIONS.select([]), empty_stream()], ids=["dataset", "stream"])
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_empty_dataset(runs, empty, name, tmp_path):
    args = TrainingArguments(str(tmp_path), report_to="none")
    for make in (partial(runs.trainer, TPUSFTTrainer, runs.config()), partial(TPUTrainer, args=args)):
        refused([f"{name} is empty", "split"], partial(make, **{name: empty}))


def test_images_for_a_model_of_text(runs):
    """Refused by upstream."""
    dataset = runs.train_dataset.add_column("image", [None] * len(runs.train_dataset))
    refused(
        ["does not seem to be a vision-language model"],
        lambda: runs.ours(train=False, kwargs={"train_dataset": dataset}),
    )


# ---- Collators and tokenizers ----


def collate(rows):
    """Pads to the longest row, without an attention mask."""
    length = max(len(row["input_ids"]) for row in rows)
    return {
        key: torch.tensor([row[key] + [pad] * (length - len(row[key])) for row in rows])
        for key, pad in (("input_ids", 0), ("labels", -100))
    }


def token_rows(lengths):
    return [{"input_ids": [*range(1, length)], "labels": [*range(1, length)]} for length in lengths]


class Rows(torch.utils.data.Dataset):
    """A dataset whose lengths nobody knows beforehand."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.fixture
def general(runs):
    """Makes a general trainer."""

    def make(dataset, model=None, cls=TPUTrainingArguments, collator=collate, tokenizer=None, **config):
        args = cls(
            **{
                "output_dir": str(runs.output_dir),
                "per_device_train_batch_size": 4,
                "train_sampling_strategy": "sequential",
                "report_to": "none",
                "save_strategy": "no",
                "disable_tqdm": True,
                **config,
            }
        )
        model = model or AutoModelForCausalLM.from_pretrained(runs.model_dir)
        return TPUTrainer(model, args, collator, dataset, processing_class=tokenizer)

    return make


def test_shapes_that_vary_are_named_at_the_first_second_one(general):
    trainer = general(Rows(token_rows([8] * 8 + [12] * 4)))
    refused(
        ["`input_ids`", "(4, 7)", "(4, 11)", "TPUTrainingArguments(max_length=...)", "length_buckets"], trainer.train
    )
    assert trainer.state.global_step == 2


def test_shape_of_a_key_that_is_not_padded(general):
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, features, labels):
            return {"loss": (features.mean(1) * self.weight - labels).square().mean()}

    def stack(rows):
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    rows = [{"features": torch.ones(3 if index < 4 else 5), "labels": torch.tensor(2.0)} for index in range(8)]
    trainer = general(Rows(rows), Features(), collator=stack)
    refused(["`features`", "(4, 3)", "(4, 5)", "Pad `features` in the data collator"], trainer.train)
    assert trainer.state.global_step == 1


def test_batches_of_one_shape_need_no_declaration(general):
    trainer = general(Rows(token_rows([8] * 8)), max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.watch.recompiles == 0


@pytest.mark.parametrize("dataset", [Dataset.from_list, Rows])
def test_a_mask_that_the_collator_leaves_out_costs_no_reads(general, dataset):
    """Without one, transformers looks for packed documents in the positions, on the host."""
    trainer = general(dataset(token_rows([8] * 8)), max_steps=4, logging_steps=100)
    start = trainer.backend.counters()
    trainer.train()
    spent = trainer.backend.counters() - start
    assert spent.fallbacks == 0
    assert spent.reads <= 2, "more than the summary at the end"


def test_masks_and_positions_of_a_batch_are_left_alone():
    ids, given = torch.ones(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [1, 0, 0]])
    collate = StaticShapeCollator(lambda rows: rows[0], [], 0, adds_mask=True)
    assert collate([{"input_ids": ids}])["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert collate([{"input_ids": ids, "attention_mask": given}])["attention_mask"] is given
    for batch in ({"input_ids": ids, "position_ids": ids}, {"pixel_values": ids}):
        assert collate([batch]) == batch


def test_longer_than_what_was_declared(general, runs):
    trainer = general(Dataset.from_list(token_rows([8] * 4 + [12] * 4)), max_length=10)
    refused(["11 tokens", "10", "TPUTrainingArguments(max_length=11)"], trainer.train)

    class Long(DataCollatorForLanguageModeling):
        def __call__(self, examples):
            return {key: nn.functional.pad(value, (0, 60)) for key, value in super().__call__(examples).items()}

    trainer = runs.ours(train=False, kwargs={"data_collator": Long(pad_token_id=0)})
    refused(["greatest declared length 48", "Truncate", "TPUSFTConfig(max_length="], trainer.train)


def test_code_of_the_callers_is_told_of_padded_columns(general, caplog):
    """With rows of one length there are none."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 4)

        def forward(self, input_ids, weights):
            return {"loss": (self.embed(input_ids).square().mean(-1) * weights).sum()}

    def with_weights(rows):
        batch = collate(rows)
        return {"input_ids": batch["input_ids"], "weights": (batch["labels"] > 0).float()}

    for lengths, padded in (([11] * 8, False), ([9] * 7 + [11], True)):
        caplog.clear()
        settings = dict(collator=with_weights, remove_unused_columns=False, num_train_epochs=1)
        trainer = general(Dataset.from_list(token_rows(lengths)), Weighted(), **settings)
        trainer.train()
        line = "Rows are padded to 16 tokens (input_ids 0, weights 0): the model is a Weighted, a custom module, which may count masked"
        assert caplog.text.count(line) == padded
        assert trainer.lengths == ([16] if padded else [10])


# ---- The caller's objects ----


def snapshot(args):
    # The device's state is one object for the whole process.
    return copy.deepcopy({key: value for key, value in vars(args).items() if key != "distributed_state"})


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("cls", [SFTConfig, TPUSFTConfig, TrainingArguments])
def test_arguments_are_not_changed(runs, tmp_path, cls, backend):
    settings = dict(bf16=True, optim="adamw_torch_fused", gradient_checkpointing_kwargs={"use_reentrant": False})
    if cls is not TrainingArguments:
        settings |= dict(model_init_kwargs={"attn_implementation": "sdpa"}, max_length=48, gradient_checkpointing=True)
    if cls is TPUSFTConfig:
        settings |= dict(length_buckets=[24, 48], backend=backend)
    args = cls(
        str(tmp_path / "run"),
        max_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=backend == "cpu",
        logging_nan_inf_filter=True,
        **settings,
    )
    before, state = snapshot(args), args.distributed_state
    trainer = TPUSFTTrainer(
        str(runs.model_dir),
        args,
        # Upstream changes the accelerator's settings for a stream.
        train_dataset=runs.train_dataset.to_iterable_dataset(),
        processing_class=runs.tokenizer,
    )
    trainer.train()
    assert trainer.backend.name == backend
    assert snapshot(args) == before
    assert args.distributed_state is state
    assert trainer.args is not args


def test_plain_training_arguments_stand_on_the_device(runs, tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", save_strategy="no")
    trainer = TPUSFTTrainer(
        str(runs.model_dir), args, train_dataset=runs.train_dataset, processing_class=runs.tokenizer
    )
    trainer.train()
    assert trainer.args.device.type == trainer.accelerator.device.type == "xla"


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), hidden_size=32, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_weights_that_a_move_by_hand_has_untied_are_tied_again(runs, xla, tied_dir, lora):
    model = AutoModelForCausalLM.from_pretrained(tied_dir).to(xla.device)
    assert model.lm_head.weight is not model.model.embed_tokens.weight, "torch_xla keeps ties by itself now"
    runs.ours(model=model, lora=lora, train=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.device.type == "xla"


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="-".join)
def test_what_an_adapter_trains_besides_stays_what_it_trains(runs, tied_dir, saved):
    """PEFT copies these layers of the tied model, so the copies are no longer tied."""

    def trained(cls, **config):
        model = AutoModelForCausalLM.from_pretrained(tied_dir)
        trainer = runs.trainer(cls, runs.config(**config), model, lora={"modules_to_save": saved})
        parameters = trainer.model.named_parameters(remove_duplicate=False)
        return {name: parameter.requires_grad for name, parameter in parameters}

    assert trained(TPUSFTTrainer) == trained(SFTTrainer, use_cpu=True)
