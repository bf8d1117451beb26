"""Every field of upstream's arguments has an answer in the table of `trainers/checks/fields.py`."""

import inspect
import re
from dataclasses import fields

import pytest
import transformers
from packaging.version import Version
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from trl import (
    DistillationConfig,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)

from hf_tpu_ext.trainers.checks.field_answers import Place, default_of
from hf_tpu_ext.trainers.checks.fields import FIELDS, LOSSES, WITHOUT_EFFECT, adapt


CONFIGS = [
    TrainingArguments,
    Seq2SeqTrainingArguments,
    SFTConfig,
    DPOConfig,
    RewardConfig,
    KTOConfig,
    GRPOConfig,
    RLOOConfig,
    DistillationConfig,
]
KNOWN = {name for row in FIELDS for name in f"{row.names} {row.beside}".split()}
# Values of fields that are no booleans.
EXAMPLES = {
    "torch_empty_cache_steps": 2,
    "ddp_backend": "gloo",
    "ddp_timeout": 60,
    "ddp_bucket_cap_mb": 25,
    "local_rank": 0,
    "cache_implementation": "dynamic",
    "max_tool_calling_iterations": 3,
}


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_field_has_an_answer(cls):
    new = {field.name for field in fields(cls)} - KNOWN
    assert not new, f"Add a row for {sorted(new)} to trainers/checks/fields.py, and a test where it works."


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="some fields are newer")
def test_a_row_is_about_a_field():
    of_trainers = {"tools", "environment_factory"}
    assert KNOWN - of_trainers <= {field.name for cls in CONFIGS for field in fields(cls)}


def test_a_field_works_or_does_not():
    """Fields that work, and some values of which are refused, have two rows."""
    works = [name for row in FIELDS if row.answer == "works" for name in row.names.split()]
    assert len(works) == len(set(works))
    others = {name for row in FIELDS if row.answer in ("replaced", "no effect") for name in row.names.split()}
    assert not others & set(works)


@pytest.mark.parametrize(("cls", "config"), [(DPOTrainer, DPOConfig), (GRPOTrainer, GRPOConfig)])
def test_names_of_losses(cls, config):
    compared = re.findall(r"\bloss_type (?:==|in) (.*):", inspect.getsource(cls._compute_loss))
    names = {name for words in compared for name in re.findall(r'"(\w+)"', words)}
    assert names == set(LOSSES[config]), "trainers/checks/fields.py, LOSSES"


@pytest.mark.parametrize("cls", CONFIGS)
def test_defaults_are_not_commented_on(cls, stock):
    config = cls(str(stock.output_dir), bf16=False, use_cpu=True, report_to="none")
    lines = adapt(config, Place()).changes
    assert [line for line in lines if not line.startswith("optim=")] == []


@pytest.mark.parametrize(
    "name",
    [name for row in WITHOUT_EFFECT if row.names != "dataloader_pin_memory" for name in row.names.split()],
)
def test_a_setting_without_effect_is_named(name, stock):
    cls = next((cls for cls in CONFIGS if name in cls.__dataclass_fields__), None)
    if cls is None:
        pytest.skip("the field is newer")
    config = cls(str(stock.output_dir), bf16=False, use_cpu=True, report_to="none")
    value = EXAMPLES.get(name, not default_of(cls, name))
    setattr(config, name, value)
    (line,) = (line for line in adapt(config, Place()).changes if line.partition(" ")[0].partition("=")[0] == name)
    assert "has no effect: " in line
    assert vars(config)[name] is value, "the caller's arguments have changed"
