"""Data at an address such as gs://bucket/chats/train.jsonl, of a bucket that is kept in memory."""

import json
import sys

import datasets
import fsspec
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.report.record import read_run


class Bucket(MemoryFileSystem):
    """In place of gcsfs, which asks Google."""

    protocol = "gs"
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://"))


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", Bucket)
    # Tests are offline; this address is not.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield fsspec.filesystem("gs")
    Bucket.store.clear()


@pytest.mark.ci
def test_rows_are_read_from_an_address(bucket, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": f"{number + 1}"}]}
        for number in range(8)
    ]
    bucket.pipe_file("gs://bucket/chats/train.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    recipe = tmp_path / "recipe.yaml"
    settings = dict(
        model_name_or_path=str(make_model(tmp_path / "model")),
        datasets=[{"path": "json", "data_files": "gs://bucket/chats/train.jsonl"}],
        max_length=32,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        output_dir=str(tmp_path / "run"),
    )
    recipe.write_text(yaml.safe_dump(settings))
    assert main(["sft", str(recipe)]) == 0
    assert read_run(tmp_path / "run").begin["rows"] == {"train_dataset": 8}
