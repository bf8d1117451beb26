"""Chips, meshes and `fsdp` options that cannot be had are refused with the fix."""

import copy
import json
import os
import sys
from pathlib import Path

import forked
import pytest
from refusals import refused
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainingArguments


pytestmark = pytest.mark.skipif(
    "CPU_NUM_DEVICES" in os.environ, reason="a process with one chip, and one with eight that it starts"
)

EXAMPLES = ["mesh='data'", "mesh='fsdp'", "mesh='data=2,fsdp=4'"]


# ---- On one chip ----


@pytest.mark.parametrize("config_cls", [TPUSFTConfig, TPUTrainingArguments])
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor=8", ["mesh='tensor=8'", "unknown axis 'tensor'", "data, fsdp"]),
        ("data:2,fsdp:4", ["'data:2'", "data, fsdp"]),
        ("data=two", ["'two'", "positive whole number"]),
        ("fsdp=0", ["'0'", "positive whole number"]),
        ("data,fsdp", ["mesh='data,fsdp'", "more than one axis without a size"]),
        ("data=2,data=4", ["'data' twice"]),
        ("", ["mesh=''"]),
        (8, ["8", "data, fsdp"]),
        ({"data": 2, "fsdp": 4}, ["'data': 2", "data, fsdp"]),
    ],
    ids=str,
)
def test_mesh_that_means_nothing(config_cls, mesh, words, xla, tmp_path):
    """Before any trainer is made, and whatever the accelerator."""
    for backend in ("auto", "cpu"):
        refused([*words, *EXAMPLES], lambda: config_cls(str(tmp_path), mesh=mesh, backend=backend))  # noqa: B023


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("data=8", ["mesh='data=8'", "is for 8 chips, not 1.", "'data=1,fsdp=1'"]),
        ("fsdp=8", ["mesh='fsdp=8'", "is for 8 chips, not 1.", "'data=1,fsdp=1'"]),
        ("data=2,fsdp=4", ["mesh='data=2,fsdp=4'", "is for 8 chips, not 1."]),
    ],
)
def test_mesh_for_more_chips(runs, mesh, words):
    refused(words, lambda: runs.ours(config_cls=TPUSFTConfig, mesh=mesh, train=False))


@pytest.mark.parametrize("config_cls", [TPUSFTConfig, TPUTrainingArguments])
@pytest.mark.parametrize("num_chips", [2, 0, -1])
def test_number_of_chips_that_is_not_there(config_cls, num_chips, xla, tmp_path):
    words = [f"num_chips={num_chips},", "1 chip", "leave it out"]
    if num_chips > 0:
        words.append(f"CPU_NUM_DEVICES={num_chips}")
    refused(words, lambda: config_cls(str(tmp_path), num_chips=num_chips))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("8", ["TPU_NUM_DEVICES=8,", "1 chip", "leave it out"]),
        ("0", ["TPU_NUM_DEVICES=0,", "1 chip"]),
        ("-1", ["TPU_NUM_DEVICES='-1'", "not a number of chips", "unset it"]),
        ("all", ["TPU_NUM_DEVICES='all'", "not a number of chips", "unset it"]),
        ("2.0", ["TPU_NUM_DEVICES='2.0'", "not a number of chips", "unset it"]),
    ],
)
def test_variable_that_names_chips_that_are_not_there(runs, value, words, monkeypatch, tmp_path):
    config = runs.config()
    monkeypatch.setenv("TPU_NUM_DEVICES", value)
    refused(words, lambda: TPUSFTConfig(str(tmp_path)))
    refused(words, lambda: runs.ours(train=False))
    # The setting counts more than the variable, if the latter can be read.
    assert TPUSFTConfig(str(tmp_path), num_chips=1).num_chips == 1
    assert "num_chips" not in vars(config)


def test_an_empty_variable_says_nothing(monkeypatch, tmp_path, xla):
    monkeypatch.setenv("TPU_NUM_DEVICES", "")
    assert TPUSFTConfig(str(tmp_path)).num_chips is None


@pytest.mark.parametrize("where", [dict(use_cpu=True), dict(backend="cpu")], ids=lambda where: next(iter(where)))
def test_an_eager_device_says_that_chips_are_none_of_its_business(runs, where, capsys):
    of_others = dict(length_buckets=[24, 48], compile_step="layers")
    trainer = runs.ours(
        config_cls=TPUSFTConfig,
        mesh="data=2,fsdp=4",
        num_chips=8,
        max_steps=1,
        **of_others,
        **where,
    )
    assert trainer.backend.name == "cpu" and trainer.state.log_history[-1]["train_loss"] > 0
    lines = capsys.readouterr().out.splitlines()
    settings = (
        "mesh=data=2,fsdp=4",
        "num_chips=8",
        "length_buckets=[24, 48]",
        "compile_step=layers",
    )
    for setting in settings:
        assert sum(f"{setting} has no effect on cpu" in line for line in lines) == 1
    runs.ours(config_cls=TPUSFTConfig, max_steps=1, **where)
    assert "has no effect" not in capsys.readouterr().out


# ---- fsdp ----


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config", "words"),
    [
        ("full_shard offload", None, ["Leave cpu_offload out, and set fsdp='full_shard'"]),
        ("shard_grad_op", None, ["reshard_after_forward=False", "fsdp='full_shard'", "mesh='data=2,fsdp=4'"]),
        ("hybrid_shard", {"version": 1}, ["hybrid_shard", "fsdp='full_shard'", "mesh='data=2,fsdp=4'"]),
        ("no_shard", {"version": 1}, ["no_shard", "fsdp='full_shard'"]),
        (True, {"reshard_after_forward": False}, ["reshard_after_forward=False", "fsdp='full_shard'"]),
        (True, {"cpu_offload": True}, ["cpu_offload=True", "Leave cpu_offload out"]),
        (True, {"fsdp_cpu_offload": True}, ["cpu_offload=True", "Leave cpu_offload out"]),
        (True, {"activation_checkpointing": True}, ["activation_checkpointing", "gradient_checkpointing=True"]),
        (True, {"activation_checkpointing": "true"}, ["activation_checkpointing", "gradient_checkpointing=True"]),
        (True, {"xla": True, "xla_fsdp_grad_ckpt": True}, ["xla_fsdp_grad_ckpt", "gradient_checkpointing=True"]),
        (True, {"xla": True, "xla_fsdp_settings": {"flatten_parameters": True}}, ["xla_fsdp_settings", "flatten"]),
        (
            True,
            {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"},
            ["Qwen3DecoderLayer", "Leave transformer_layer_cls_to_wrap out"],
        ),
        (True, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, ["SIZE_BASED_WRAP", "Leave auto_wrap_policy out"]),
        (True, {"min_num_params": 2000}, ["min_num_params=2000", "Leave min_num_params out"]),
        (True, {"state_dict_type": "SHARDED_STATE_DICT"}, ["SHARDED_STATE_DICT", "plain Hugging Face form"]),
        (
            True,
            {"cpu_ram_efficient_loading": True},
            ["cpu_ram_efficient_loading=True", "Leave cpu_ram_efficient_loading out"],
        ),
        (True, {"limit_all_gathers": True}, ["limit_all_gathers=True", "Leave limit_all_gathers out"]),
        (True, {"backward_prefetch": "BACKWARD_PRE"}, ["backward_prefetch", "Leave backward_prefetch out"]),
    ],
    ids=str,
)
def test_fsdp_option_without_a_meaning(runs, fsdp, fsdp_config, words):
    words = ["fsdp", "no equivalent on XLA", *words]
    refused(words, lambda: runs.ours(train=False, fsdp=fsdp, fsdp_config=copy.copy(fsdp_config)))


@pytest.mark.parametrize("mesh", ["data", "data=1", "data,fsdp=1"])
def test_fsdp_on_a_mesh_of_whole_weights(runs, mesh):
    words = ["fsdp", f"mesh={mesh!r}", "Leave fsdp out, or leave mesh out"]
    refused(words, lambda: runs.ours(config_cls=TPUSFTConfig, train=False, fsdp=True, mesh=mesh))


@pytest.mark.parametrize(
    ("fsdp", "fsdp_config"),
    [
        (True, None),
        ("full_shard", None),
        ("full_shard auto_wrap", None),
        (["full_shard"], None),
        ("full_shard", {"version": 1}),
        (True, {"xla": True, "xla_fsdp_v2": True}),
        (True, {"reshard_after_forward": True, "cpu_offload": False, "activation_checkpointing": False}),
        (True, {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_use_orig_params": True}),
    ],
    ids=str,
)
def test_fsdp_that_says_what_is_done(runs, fsdp, fsdp_config):
    config = runs.config(fsdp=fsdp, fsdp_config=copy.copy(fsdp_config))
    before = copy.deepcopy(config.fsdp_config)
    trainer = runs.trainer(TPUSFTTrainer, config)
    assert trainer.adapted.mesh == "fsdp"
    assert "fsdp has no effect on one chip" in trainer.adapted.changes
    assert not trainer.is_fsdp_enabled
    assert config.fsdp is True and config.fsdp_config == before


# ---- On eight chips ----


# The runtime starts once in a process, so what is asked before it starts comes first.
ON_EIGHT = """
import json, os, sys
from pathlib import Path
from conftest import Runs, make_rows
from test_bad_chips import MoreRows
from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

model_dir, output = sys.argv[1:]
runs = Runs(model_dir, Path(output).parent / "run")
runs.train_dataset = make_rows(64)
told = {}

def note(case, call):
    try:
        told[case] = call()
    except ValueError as error:
        told[case] = str(error)

def train(more_rows=0, more_to_evaluate=0, accumulation=2, token=None, **config):
    collator = MoreRows(pad_token_id=0)
    collator.more, collator.token = more_rows, token
    config = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1, max_steps=2) | config
    args = runs.config(TPUSFTConfig, gradient_accumulation_steps=accumulation, **config)
    trainer = runs.trainer(TPUSFTTrainer, args, data_collator=collator)
    trainer.train()
    collator.more = more_to_evaluate
    trainer.evaluate()
    return [entry for entry in trainer.state.log_history if {"loss", "eval_loss"} & set(entry)]

note("too many", lambda: TPUSFTConfig(output, num_chips=9))
note("none", lambda: TPUSFTConfig(output, num_chips=0))
os.environ["TPU_NUM_DEVICES"] = "16"
note("too many by the variable", train)
del os.environ["TPU_NUM_DEVICES"]
import torch_xla
assert not torch_xla._XLAC._xla_runtime_is_initialized(), "a refusal costs nothing"

for mesh in ("data=4", "data=3,fsdp", "data=16,fsdp", "data=2,fsdp=8"):
    note(mesh, lambda: train(mesh=mesh))
note("fsdp and mesh", lambda: train(fsdp=True, mesh="data=8,fsdp=1"))
note("fewer, late", lambda: train(num_chips=4))
os.environ["TPU_NUM_DEVICES"] = "2"
note("fewer by the variable, late", lambda: train())
del os.environ["TPU_NUM_DEVICES"]

for mesh in ("data", "fsdp"):
    note(f"9 rows, {mesh}", lambda: train(more_rows=1, mesh=mesh))
note("12 rows at once", lambda: train(more_rows=4, accumulation=1))
note("9 rows to evaluate", lambda: train(more_to_evaluate=1))
note("token", lambda: train(token=999))
note("16 rows", lambda: train(more_rows=8))
note("16 rows, full steps", lambda: train(more_rows=8, accumulation=1, mesh="fsdp"))
note("use_cpu", lambda: train(mesh="fsdp", use_cpu=True))
Path(output).write_text(json.dumps(told))
"""


class MoreRows(DataCollatorForLanguageModeling):
    """Yields more rows than it was given, as one that makes variants of them does."""

    more, token = 0, None

    def __call__(self, examples):
        batch = super().__call__([*examples, *examples[: self.more]])
        if self.token is not None:
            batch["input_ids"][5, 0] = self.token
        return batch


@pytest.fixture(scope="module")
def on_eight(tiny_model, tmp_path_factory):
    """What each case of a process with eight devices was told, or logged."""
    output = tmp_path_factory.mktemp("eight") / "told.json"
    env = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    result = forked.run(
        [sys.executable, "-c", ON_EIGHT, str(tiny_model), str(output)],
        env=env,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("too many", ["num_chips=9,", "8 chips", "1...8", "leave it out", "CPU_NUM_DEVICES=9"]),
        ("none", ["num_chips=0,", "8 chips", "1...8", "leave it out"]),
        ("too many by the variable", ["TPU_NUM_DEVICES=16,", "8 chips", "1...8", "leave it out"]),
        ("data=4", ["mesh='data=4'", "is for 4 chips, not 8.", "'data=2,fsdp=4'", "num_chips=4"]),
        ("data=3,fsdp", ["mesh='data=3,fsdp'", "is for 6 chips, not 8.", "'data=2,fsdp=4'"]),
        ("data=16,fsdp", ["mesh='data=16,fsdp'", "is for 16 chips, not 8.", "'data=2,fsdp=4'"]),
        ("data=2,fsdp=8", ["is for 16 chips, not 8.", "'data=2,fsdp=4'"]),
        ("fsdp and mesh", ["fsdp", "mesh='data=8,fsdp=1'", "Leave fsdp out, or leave mesh out"]),
        ("fewer, late", ["num_chips=4,", "already drives 8", "before", "restart"]),
        ("fewer by the variable, late", ["TPU_NUM_DEVICES=2,", "already drives 8", "before", "restart"]),
        ("9 rows, data", ["9 rows", "8 chips", "multiple of 8", "data collator", "num_chips=1"]),
        ("9 rows, fsdp", ["9 rows", "8 chips", "multiple of 8", "data collator", "num_chips=1"]),
        ("12 rows at once", ["12 rows", "8 chips", "multiple of 8", "data collator"]),
        ("token", ["Row 5 of the batch", "token id 999", "has 259 rows"]),
        ("9 rows to evaluate", ["9 rows", "8 chips", "multiple of 8", "data collator"]),
    ],
)
def test_on_eight_chips(on_eight, case, words):
    assert isinstance(on_eight[case], str), f"not refused: {on_eight[case]}"
    missing = [word for word in words if word not in on_eight[case]]
    assert not missing, f"{missing} not in: {on_eight[case]}"


@pytest.mark.ci
@pytest.mark.parametrize(("case", "accumulation"), [("16 rows", 2), ("16 rows, full steps", 1)])
def test_a_batch_of_more_rows_that_divides_evenly_is_split(on_eight, runs, rows, case, accumulation):
    """As one chip trains on it."""
    collator = MoreRows(pad_token_id=0)
    collator.more = 8
    trainer = runs.ours(
        gradient_accumulation_steps=accumulation,
        kwargs={"data_collator": collator, "train_dataset": rows(64)},
        per_device_train_batch_size=8,
        max_steps=2,
    )
    ours = [entry for entry in trainer.state.log_history if "loss" in entry]
    theirs = [entry for entry in on_eight[case] if "loss" in entry]
    assert len(ours) == len(theirs) == 2
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy"):
            assert other[key] == pytest.approx(mine[key], rel=1e-5), key


@pytest.mark.ci
def test_a_mesh_on_an_eager_device_trains(on_eight):
    losses = [entry["loss"] for entry in on_eight["use_cpu"] if "loss" in entry]
    assert len(losses) == 2 and min(losses) > 0
