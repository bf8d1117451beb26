"""A reward function that is not there is named before anything is loaded, with what is meant; a line of data that is no JSON is named."""

import sys

import datasets
import pytest
from trl import ScriptArguments
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

from hf_tpu_ext.cli.script_checks import check_reward_functions, naming_broken_rows
from hf_tpu_ext.errors import UserError


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "rewards_here.py").write_text("def is_short(completions, **kwargs): ...")
    (tmp_path / "rewards_of_more.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("rewards_here", None)


@pytest.mark.parametrize(
    ("name", "fixed", "words"),
    [
        (
            "rewards_here.is_shrt",
            "rewards_here.is_short",
            "no function 'is_shrt'. Did you mean rewards_here.is_short?",
        ),
        ("rewards_here.score", "rewards_here.is_short", "no function 'score'. It has is_short."),
        ("reward_here.is_short", "rewards_here.is_short", "no reward_here.py in .* Did you mean 'rewards_here.py'?"),
        ("is_short", "accuracy_reward", "for example my_rewards.is_short for is_short in my_rewards.py"),
    ],
)
def test_a_function_that_is_not_there(here, name, fixed, words):
    with pytest.raises(UserError, match=words):
        check_reward_functions(["accuracy_reward", name])
    check_reward_functions([fixed])


def test_what_a_module_imports_is_not_its_name(here):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        check_reward_functions(["rewards_of_more.is_short"])


def test_a_line_that_is_no_json(here):
    (here / "chats").mkdir()
    (here / "chats" / "train.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    with pytest.raises(UserError, match="chats/train.jsonl, line 3, is not JSON: .* Correct the line or remove it"):
        mixture = DatasetMixtureConfig([DatasetConfig("chats"), DatasetConfig("trl-lib/Capybara")])
        with naming_broken_rows(ScriptArguments(), mixture):
            datasets.load_dataset("chats", cache_dir=str(here / "cache"))
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        with naming_broken_rows(ScriptArguments("tiny"), DatasetMixtureConfig()):
            datasets.load_dataset("chats", cache_dir=str(here / "cache"))


def test_a_first_line_that_is_no_json(here):
    """`datasets` reads it to look for columns of several types, and says neither file nor line."""
    (here / "chats").mkdir()
    (here / "chats" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b", "more": \n{"text": "c"}\n')
    with pytest.raises(UserError, match="chats/train.jsonl, line 2, is not JSON"):
        with naming_broken_rows(ScriptArguments("chats"), DatasetMixtureConfig()):
            datasets.load_dataset("chats", cache_dir=str(here / "cache"))
    with pytest.raises(ValueError, match="^not read there$"):
        with naming_broken_rows(ScriptArguments("chats"), DatasetMixtureConfig()):
            raise ValueError("not read there")


@pytest.mark.parametrize(
    ("files", "empty"),
    [
        ({"train": ""}, "train"),
        ({"train": "\n"}, "train"),
        ({"train": "", "test": '{"text": "a"}\n'}, "train"),
        ({"train": '{"text": "a"}\n', "test": ""}, "test"),
    ],
    ids=str,
)
def test_a_file_without_a_row(here, files, empty):
    (here / "chats").mkdir()
    for name, text in files.items():
        (here / "chats" / f"{name}.jsonl").write_text(text)

    def check(name="chats"):
        with naming_broken_rows(ScriptArguments(name), DatasetMixtureConfig()):
            return datasets.load_dataset("chats", cache_dir=str(here / "cache"))

    with pytest.raises(UserError, match=f"^chats/{empty}.jsonl has no row. Write rows into it, .* or remove the file"):
        check()
    with pytest.raises((StopIteration, ValueError), match="^$|^Instruction"):
        check("tiny")
    others = [name for name in files if name != empty]
    (here / "chats" / f"{empty}.jsonl").write_text('{"text": "b"}\n')
    assert {*check()} == {*files}
    (here / "chats" / f"{empty}.jsonl").unlink()
    assert not others or [*check()] == others


def test_an_empty_file_beside_others_of_its_split(here):
    (here / "chats").mkdir()
    (here / "chats" / "train-0.jsonl").write_text("")
    (here / "chats" / "train-1.jsonl").write_text('{"text": "a"\n')
    with pytest.raises(UserError, match="chats/train-1.jsonl, line 1, is not JSON"):
        with naming_broken_rows(ScriptArguments("chats"), DatasetMixtureConfig()):
            datasets.load_dataset("chats", cache_dir=str(here / "cache"))


def test_files_of_other_columns(here):
    (here / "pairs").mkdir()
    (here / "pairs" / "train.jsonl").write_text('{"chosen": "a", "rejcted": "b"}\n')
    (here / "pairs" / "test.jsonl").write_text('{"chosen": "a", "rejected": "b"}\n')
    with pytest.raises(UserError) as error:
        with naming_broken_rows(ScriptArguments("pairs"), DatasetMixtureConfig()):
            datasets.load_dataset("pairs", cache_dir=str(here / "cache"))
    message = str(error.value)
    assert "pairs/test.jsonl has chosen, rejected; pairs/train.jsonl has chosen, rejcted" in message
    assert "need the same columns" in message and "Rename a column" in message
