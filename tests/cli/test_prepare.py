"""`hf-tpu prepare`."""

import argparse
import re
import sys

import pytest
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.cli import prepare
from hf_tpu_ext.examples import tiny_vision
from hf_tpu_ext.installing import install_command
from hf_tpu_ext.vision import families


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser(prog="hf-tpu")
    prepare.add_parser(parser.add_subparsers())
    args = parser.parse_args(["prepare", *argv])
    return args.func(args)


def test_tiny_makes_model_and_data_and_may_run_again(tmp_path, capsys):
    for model_type in ("qwen3", "llama"):
        assert run("tiny", "--output_dir", str(tmp_path), "--model_type", model_type) == 0
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == model_type
    assert AutoTokenizer.from_pretrained(tmp_path / "model").pad_token == "<|endoftext|>"
    assert load_dataset(str(tmp_path / "data"))["train"].column_names == ["prompt", "completion"]
    assert "1792 training rows, 256 evaluation rows" in capsys.readouterr().out


def test_tiny_makes_a_model_that_sees_and_pictures(tmp_path):
    assert run("tiny", "--output_dir", str(tmp_path), "--model_type", "smolvlm") == 0
    assert AutoConfig.from_pretrained(tmp_path / "model").model_type == "smolvlm"
    rows = load_dataset(str(tmp_path / "data"))["test"]
    assert len(rows) == 64 and rows[0]["images"][0].size == (56, 56)
    assert families.FAMILIES.keys() == set(tiny_vision.FAMILIES)


@pytest.mark.parametrize(("with_xla", "extras"), [(True, "tpu,images"), (False, "images")])
def test_what_pictures_need_leaves_the_torch_of_torch_xla(tmp_path, monkeypatch, with_xla, extras):
    monkeypatch.setattr(prepare, "find_spec", lambda name: name if with_xla else None)
    monkeypatch.delitem(sys.modules, "hf_tpu_ext.examples.tiny_vision")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=re.escape(install_command(extras))):
        run("tiny", "--output_dir", str(tmp_path), "--model_type", "smolvlm")


def test_a_model_and_data_of_ones_own_are_no_earlier_call(tmp_path):
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r"holds other files \(data, model\)"):
        run("tiny", "--output_dir", str(tmp_path), "--model_type", "smolvlm")
    assert not [*(tmp_path / "model").iterdir()]


@pytest.mark.parametrize("other", ["train.py", None])
def test_nothing_of_others_is_replaced(tmp_path, other):
    """As in a project that has a directory of data."""
    (tmp_path / "data").mkdir()
    mine = tmp_path / "data" / "train.jsonl"
    mine.write_text("mine")
    if other is not None:
        (tmp_path / other).touch()
    with pytest.raises(ValueError, match=r"holds other files \(data.*\).* Give a directory of its own: ") as refused:
        run("tiny", "--output_dir", str(tmp_path))
    assert mine.read_text() == "mine" and not (tmp_path / "model").exists()
    assert run("tiny", *str(refused.value).rpartition(": ")[2].split()) == 0


@pytest.mark.parametrize("argv", [(), ("tiny",), ("huge", "--output_dir", "x")])
def test_missing_arguments_are_named(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "{tiny}" in error or "'tiny'" in error or "--output_dir" in error
