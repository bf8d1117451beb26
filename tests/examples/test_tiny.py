"""The tiny tokenizer, models and tasks."""

import json
import math

import pytest
import torch
from datasets import load_dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.examples.tiny import (
    FAMILIES,
    make_arithmetic,
    make_model,
    make_preferences,
    make_tokenizer,
    work_addition,
)


CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "7 à"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_tokenizer_gives_one_token_per_byte(tokenizer):
    text = "37+85? Zoë\n\tsaid “no” 😀"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 259


def test_chat_template_renders_chatml_and_keeps_its_prompt(tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(CHAT[:3], tokenize=False) == f"{prompt}7 à<|im_end|>\n"


def test_generation_markers_hold_what_the_assistant_says_and_its_end(tokenizer):
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "7 à<|im_end|>2<|im_end|>"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_builds_loads_and_runs(model_type, tied, tmp_path):
    make_model(tmp_path, model_type, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == model_type
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert len(model.get_input_embeddings().weight) == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)

    inputs = tokenizer("37+85?", return_tensors="pt")
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    # Near that of a uniform guess: no weight is left uninitialised.
    assert loss.item() == pytest.approx(math.log(259), abs=1.5)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_seed_and_overrides(tmp_path):
    dirs = {
        "first": make_model(tmp_path / "first"),
        "same": make_model(tmp_path / "same"),
        "seed": make_model(tmp_path / "seed", seed=1),
        "deep": make_model(tmp_path / "deep", num_hidden_layers=3),
    }
    weights = {name: load_file(path / "model.safetensors") for name, path in dirs.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(value, weights["same"][key]) for key, value in weights["first"].items())
    assert not torch.equal(weights["first"][name], weights["seed"][name])
    assert json.loads((dirs["deep"] / "config.json").read_text())["num_hidden_layers"] == 3


def test_making_a_model_leaves_the_global_random_state_alone(tmp_path):
    before = torch.get_rng_state()
    make_model(tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_unknown_family_is_an_error_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match="'gpt5' is not a tiny model family. Choose one of: gemma2"):
        make_model(tmp_path, "gpt5")


@pytest.mark.parametrize(
    ("a", "b", "worked"),
    [
        (37, 85, "7+5=12, write 2 carry 1; 3+8+1=12; 122"),
        (2, 3, "2+3=5; 5"),
        (105, 204, "5+4=9, write 9; 0+0=0, write 0; 1+2=3; 309"),
    ],
)
def test_worked_addition(a, b, worked):
    assert work_addition(a, b) == worked


def test_arithmetic_is_right_and_of_varying_length(tmp_path):
    dataset = load_dataset(str(make_arithmetic(tmp_path, num_rows=160)))
    assert {split: rows.num_rows for split, rows in dataset.items()} == {"train": 140, "test": 20}
    prompts = {split: {row["prompt"][0]["content"] for row in rows} for split, rows in dataset.items()}
    assert len(prompts["train"] | prompts["test"]) == 160
    for row in dataset["test"]:
        a, b = row["prompt"][0]["content"].removesuffix("?").split("+")
        assert row["completion"][0]["content"].endswith(f"; {int(a) + int(b)}")
    assert len({len(row["completion"][0]["content"]) for row in dataset["train"]}) > 10


def test_chosen_answers_are_right_and_rejected_ones_wrong(tmp_path):
    dataset = load_dataset(str(make_preferences(tmp_path, num_rows=80)))
    for row in dataset["train"]:
        a, b = row["prompt"][0]["content"].removesuffix("?").split("+")
        answers = {name: int(row[name][0]["content"].split("; ")[-1]) for name in ("chosen", "rejected")}
        assert answers["chosen"] == int(a) + int(b) != answers["rejected"]
    dataset = load_dataset(str(make_preferences(tmp_path / "unpaired", num_rows=80, paired=False)))
    for row in dataset["train"]:
        a, b = row["prompt"][0]["content"].removesuffix("?").split("+")
        assert (int(row["completion"][0]["content"].split("; ")[-1]) == int(a) + int(b)) is row["label"]
    assert all(set(rows["label"][:2]) == {False, True} for rows in dataset.values())


@pytest.mark.parametrize("make", [make_arithmetic, make_preferences])
def test_tasks_depend_on_the_seed_only(make, tmp_path):
    written = [
        (make(tmp_path / str(index), num_rows=40, seed=seed) / "train.jsonl").read_bytes()
        for index, seed in enumerate((0, 0, 1))
    ]
    assert written[0] == written[1] != written[2]
