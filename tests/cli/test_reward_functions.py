"""A reward function that is not there is named before anything is loaded, with what is meant."""

import sys

import pytest

from hf_tpu_ext.cli.reward_functions import check_reward_functions
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
