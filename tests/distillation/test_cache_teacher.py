"""The command `hf-tpu cache-teacher` makes the cache that the recipe's training looks its sequences up in."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BigBirdConfig,
    BigBirdForCausalLM,
    LlamaConfig,
    Phi3Config,
)
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext.backends.processes import ALONE
from hf_tpu_ext.cli import cache_teacher
from hf_tpu_ext.cli.main import main
from hf_tpu_ext.distillation.cache import TeacherCache
from hf_tpu_ext.examples.jsonl import write_splits
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model
from hf_tpu_ext.trainers.checkpoint.run_lock import only_run_in


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A student, a teacher of another size, and 32 rows of arithmetic."""
    directory = tmp_path_factory.mktemp("tiny")
    make_model(directory / "model", hidden_size=32, intermediate_size=48)
    make_model(directory / "teacher", seed=1, hidden_size=48, intermediate_size=64)
    make_arithmetic(directory / "data", num_rows=32)
    return directory


@pytest.fixture
def recipe(tiny, tmp_path):
    """Writes a recipe, with changes, and returns its path."""

    def write(**changes):
        values = {
            "model_name_or_path": str(tiny / "model"),
            "dataset_name": str(tiny / "data"),
            "kd_cache": str(tmp_path / "cache"),
            "kd_temperature": 2.0,
            "max_length": 64,
            "length_buckets": [32, 48],
            "eval_strategy": "steps",
            "per_device_eval_batch_size": 8,
            "bf16": False,
            "disable_tqdm": True,
            "output_dir": str(tmp_path / "run"),
        }
        path = tmp_path / "recipe.yaml"
        values = {key: value for key, value in {**values, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(values))
        return str(path)

    return write


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory):
    """The datasets as upstream's trainer prepares them."""
    data = load_dataset(str(tiny / "data"))
    config = SFTConfig(
        str(tmp_path_factory.mktemp("stock")), max_length=64, use_cpu=True, bf16=False, report_to="none"
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(tiny / "model"),
        config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(tiny / "model"),
    )
    return trainer.train_dataset, trainer.eval_dataset


def reference(tiny, input_ids):
    model = AutoModelForCausalLM.from_pretrained(tiny / "teacher", dtype=torch.float64)
    with torch.no_grad():
        return model(torch.tensor([input_ids])).logits[0]


def test_cache_of_a_recipe(xla, tiny, recipe, prepared, tmp_path, capsys):
    argv = ["cache-teacher", "--config", recipe(), "--kd_teacher", str(tiny / "teacher"), "--kd_top_k", "32"]
    argv += ["--batch-size", "8"]
    assert main(argv) == 0
    told = capsys.readouterr().out
    cache = TeacherCache(tmp_path / "cache")
    manifest = cache.manifest
    tokens = sum(len(row) for dataset in prepared for row in dataset["input_ids"])
    assert "on CPU, compiled by XLA, 1 chip, batch size 8" in told
    assert f"32 sequences of {tokens} tokens, {manifest.bytes_per_token:.1f} bytes per token" in told
    share = manifest.coverage[0]
    assert f"{share:.1%} at temperature 1, " in told
    assert f"warning: The top 32 tokens hold {share:.0%} of the teacher's mass at temperature 1" in told
    # Without the key that a cache alone takes.
    again = [*argv[1:5], "--kd_top_k", "32", "--kd_cache", str(tmp_path / "cache")]
    assert f"Train from it: {shlex.join(['hf-tpu', 'sft', *again])}" in told
    assert manifest.teacher == str(tiny / "teacher")
    assert (manifest.top_k, manifest.temperatures, manifest.max_length) == (32, (1.0, 2.0), 64)
    assert max(len(row) for dataset in prepared for row in dataset["input_ids"]) == 64, "no row was cut"

    for dataset in prepared:
        cache.check_dataset(dataset, "train_dataset")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    cache.check(2.0, 32, tokenizer, 64, len(tokenizer))
    for input_ids in (prepared[0]["input_ids"][0], prepared[1]["input_ids"][0]):
        expected = (reference(tiny, input_ids) / 2).log_softmax(-1)
        found = cache.lookup(input_ids, 2.0, 32)
        torch.testing.assert_close(found.log_probs.double(), expected.topk(32).values, rtol=2**-11, atol=1e-3)
    # No run begins here, and a second command has nothing to do.
    assert not (tmp_path / "run").exists()
    assert main(argv) == 0
    assert "is complete already, with the same settings." in capsys.readouterr().out


def test_rows_that_pad_the_teachers_embedding_are_no_tokens(xla, tiny, recipe, prepared, tmp_path):
    """A cache holds none of them, and a distribution over the student's tokens: as a teacher that runs beside it."""
    teacher = AutoModelForCausalLM.from_pretrained(tiny / "teacher", dtype=torch.float64)
    vocab_size = teacher.config.vocab_size
    teacher.resize_token_embeddings(vocab_size + 64, mean_resizing=False)
    with torch.no_grad():
        teacher.get_output_embeddings().weight[vocab_size:] = teacher.get_output_embeddings().weight[:64] * 2
    shutil.copytree(tiny / "teacher", tmp_path / "teacher")
    teacher.save_pretrained(tmp_path / "teacher")
    input_ids = prepared[0]["input_ids"][0]
    with torch.no_grad():
        logits = teacher(torch.tensor([input_ids])).logits[0]
    assert (logits.argmax(-1) >= vocab_size).any()
    assert main(["cache-teacher", "--config", recipe(kd_top_k=8), "--kd_teacher", str(tmp_path / "teacher")]) == 0
    cache = TeacherCache(tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    cache.check(2.0, 8, tokenizer, 64, vocab_size)
    assert cache.manifest.vocab_size == vocab_size
    expected = (logits[:, :vocab_size] / 2).log_softmax(-1).topk(8).values
    torch.testing.assert_close(cache.lookup(input_ids, 2.0, 8).log_probs.double(), expected, rtol=2**-11, atol=1e-3)


def test_defaults(xla, tiny, recipe, tmp_path, capsys):
    """All of a small vocabulary; in bfloat16, as upstream computes by default; and where `--output_dir` says."""
    # A teacher is not rounded: its layers need not be divided by the size of a group.
    changes = dict(qat={"weight_dtype": "int4", "group_size": 13})
    argv = ["cache-teacher", "--config", recipe(bf16=None, kd_temperature=None, eval_strategy=None, **changes)]
    assert main([*argv, "--kd_teacher=base", "--output_dir", str(tmp_path / "other"), "--kd_top_k", "259"]) == 0
    assert f"{tiny / 'model'} (the student's own start) on CPU" in capsys.readouterr().out
    manifest = TeacherCache(tmp_path / "other").manifest
    assert (manifest.teacher, manifest.compute_dtype) == (str(tiny / "model"), "bfloat16")
    assert manifest.temperatures == (1.0,) and manifest.coverage == pytest.approx([1.0], abs=1e-3)
    assert manifest.sequences == 28
    assert not (tmp_path / "cache").exists()


def test_the_students_own_start_is_its_revision(tiny, monkeypatch):
    model, noted = str(tiny / "model"), []

    def note(load, name, revision=None, **kwargs):
        noted.append((name, revision))
        return load(name, **kwargs)

    for loader in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", partial(note, loader.from_pretrained))
    model_args = SimpleNamespace(model_name_or_path=model, model_revision="step-1000", attn_implementation=None)
    for teacher in (model, str(tiny / "teacher")):
        cache_teacher._load(teacher, SimpleNamespace(trust_remote_code=False), model_args, None)
    revisions = {(name, revision) for name, revision in noted}
    assert revisions == {(model, "step-1000"), (str(tiny / "teacher"), None)}


def test_smoke(xla, tiny, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = recipe(model_name_or_path="Qwen/Qwen3-0.6B", dataset_name="trl-lib/Capybara", kd_cache="caches/real")
    assert main(["cache-teacher", "--config", path, "--smoke", str(tiny)]) == 0
    assert f"Train from it: hf-tpu sft --config {path} --smoke {tiny}" in capsys.readouterr().out
    manifest = TeacherCache("runs/smoke/recipe/teacher_cache").manifest
    assert (manifest.top_k, manifest.teacher) == (16, str(tiny / "teacher"))


@pytest.mark.ci
def test_rows_that_are_held_out_are_those_of_training(xla, tiny, recipe, capsys):
    """Not all have a place in the cache, without eval_strategy: training would look for others."""
    rows = {"datasets": [{"path": "json", "data_files": str(tiny / "data" / "train.jsonl")}], "test_split_size": 0.25}
    path = recipe(dataset_name=None, eval_strategy=None, max_steps=1, report_to="none", save_strategy="no", **rows)
    assert main(["cache-teacher", "--config", path, "--kd_teacher", str(tiny / "teacher")]) == 0
    assert main(["sft", "--config", path, "--per_device_train_batch_size", "2"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        (
            {"model_name_or_path": None},
            [],
            "model_name_or_path, the student whose tokenizer prepares the data, is missing",
        ),
        ({"dataset_name": None}, [], "dataset_name is missing"),
        ({"kd_cache": None}, [], "kd_cache, the directory of the cache, is missing"),
        ({"packing": True}, [], "packing=True joins sequences to rows"),
        ({"eval_packing": True}, [], "eval_packing=True joins sequences to rows"),
        ({"dataset_streaming": True}, [], "dataset_streaming=True does not work with a cache"),
        (
            {"dataset_name": None, "datasets": [{"path": "trl-lib/tldr"}], "streaming": True},
            [],
            "streaming=True does not work with a cache, which needs to know all sequences before the first. Set streaming=False.",
        ),
        ({"dataset_test_split": "held_out"}, [], "The dataset has no split 'held_out', but 'train', 'test'."),
        ({}, ["--temperatures", "1", "0"], "--temperatures 0.0 is not above 0"),
        (
            {"max_length": 2, "length_buckets": None},
            [],
            "No row of train_dataset is left when it is prepared with max_length=2",
        ),
        ({}, ["--batch_size", "0"], "--batch_size 0 is not positive"),
        (
            {},
            ["--kd_top_k", "260"],
            "kd_top_k=260, but the teacher's vocabulary has 259 tokens. Set kd_top_k to 1...259.",
        ),
        ({}, ["--kd_teacher"], "command line: kd_teacher has no value, expected str | None."),
        (
            {},
            ["--temperatur", "2", "--kd_topk", "2"],
            "unknown key 'kd_topk' on the command line. Did you mean 'kd_top_k'?",
        ),
    ],
)
def test_mistakes(xla, tiny, recipe, capsys, changes, extra, message):
    argv = ["cache-teacher", "--config", recipe(**changes), "--kd_teacher", str(tiny / "teacher"), *extra]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_teacher_is_missing(recipe, capsys):
    assert main(["cache-teacher", "--config", recipe()]) == 2
    assert "kd_teacher, the model to learn from, is missing" in capsys.readouterr().err


def test_teacher_of_another_vocabulary(tiny, recipe, tmp_path, capsys):
    other = shutil.copytree(tiny / "teacher", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["cache-teacher", "--config", recipe(), "--kd_teacher", str(other)]) == 2
    assert (
        "has another vocabulary than the student: 2 tokens have other ids, for example 'a'" in capsys.readouterr().err
    )


def test_template_that_adds_tokens(tiny, recipe, tmp_path, capsys):
    source = AutoTokenizer.from_pretrained(tiny / "model")
    source.add_tokens(["<think>"], special_tokens=True)
    source.save_pretrained(tmp_path / "source")
    path = recipe(chat_template_path=str(tmp_path / "source"))
    assert main(["cache-teacher", "--config", path, "--kd_teacher", str(tiny / "teacher")]) == 2
    assert "adds tokens to the vocabulary, for which the teacher has no weights" in capsys.readouterr().err
    # What the message says.
    template = tmp_path / "template.jinja"
    template.write_text(source.chat_template)
    path = recipe(chat_template_path=str(template))
    assert main(["cache-teacher", "--config", path, "--kd_teacher", str(tiny / "teacher")]) == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}], "No row of train_dataset is left"),
        ([{"input_ids": [1, 999, 3], "labels": [1, 999, 3]}], "The data have the token id 999, but the teacher's"),
    ],
)
def test_tokens_that_teach_nothing(tiny, recipe, tmp_path, capsys, rows, message):
    write_splits(tmp_path / "tokens", {"train": rows, "test": rows})
    argv = ["cache-teacher", "--kd_teacher", str(tiny / "teacher")]
    assert main([*argv, "--config", recipe(dataset_name=str(tmp_path / "tokens"))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data", "fsdp"])
def test_eight_devices_make_the_same_cache(xla, tiny, recipe, prepared, tmp_path, mesh):
    argv = ["cache-teacher", "--config", recipe(), "--kd_teacher", str(tiny / "teacher"), "--kd_top_k", "16"]
    assert main([*argv, "--output_dir", str(tmp_path / "one")]) == 0
    command = [
        shutil.which("hf-tpu", path=os.path.dirname(sys.executable)),
        *argv,
        "--batch_size",
        "1",
        "--mesh",
        mesh,
    ]
    result = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "eight")],
        env={**os.environ, "CPU_NUM_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "8 chips, batch size 8" in result.stdout
    one, eight = TeacherCache(tmp_path / "one"), TeacherCache(tmp_path / "eight")
    for dataset in prepared:
        for input_ids in dataset["input_ids"]:
            for ours, other in zip(eight.lookup(input_ids, 2.0, 16), one.lookup(input_ids, 2.0, 16), strict=True):
                torch.testing.assert_close(ours, other, rtol=0, atol=2**-9)


def test_two_builds_at_once_are_refused(tiny, recipe, tmp_path, capsys):
    """The second would delete files of the first, whose manifest would then tell of files that it has not written."""
    with only_run_in(tmp_path / "cache", ALONE):
        assert main(["cache-teacher", "--config", recipe(kd_teacher=str(tiny / "teacher"), use_cpu=True)]) == 2
    error = capsys.readouterr().err
    assert "Another run writes to" in error and str(tmp_path / "cache") in error
    assert list((tmp_path / "cache").iterdir()) == []


LONGEST = 30
SIZES = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0 + index for index in range(8)],
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_teachers_whose_frequencies_depend_on_the_length(xla, tiny, recipe, tmp_path, capsys, rope):
    """Up to the length from which they do, the cache is what upstream's model says of the row, whatever it is padded to."""
    torch.manual_seed(0)
    if rope == "dynamic":
        config = LlamaConfig(rope_parameters=ROPES[rope], max_position_embeddings=LONGEST, **SIZES)
    else:
        positions = {"max_position_embeddings": 128, "original_max_position_embeddings": LONGEST}
        config = Phi3Config(rope_parameters=ROPES[rope], **positions, **SIZES)
    teacher = tmp_path / "teacher"
    AutoModelForCausalLM.from_config(config).save_pretrained(teacher)
    AutoTokenizer.from_pretrained(tiny / "teacher").save_pretrained(teacher)
    (tmp_path / "data").mkdir()
    rows = [{"text": "abcdefgh" * 3 + "xyzuv", "n": index} for index in range(2)] + [{"text": "some words", "n": 2}]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(dataset_name=str(tmp_path / "data"), eval_strategy=None, length_buckets=None, kd_temperature=None)
    argv = ["cache-teacher", "--config", recipe(**settings), "--kd_teacher", str(teacher), "--kd_top_k", "32"]
    assert main(argv) == 0
    cache = TeacherCache(tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    for row in rows:
        input_ids = tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]
        assert len(input_ids) <= LONGEST
        with torch.no_grad():
            expected = model(torch.tensor([input_ids])).logits[0].log_softmax(-1)
        found = cache.lookup(input_ids, 1.0, 32)
        torch.testing.assert_close(found.log_probs.double(), expected.topk(32).values, rtol=2**-11, atol=1e-3)

    rows[2]["text"] = "a" * 40
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv += ["--overwrite", "true"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert f"(rope_type={rope!r}) beyond {LONGEST} tokens, and a row of the data has 41" in error
    # The fix that it names; the other one is tested with students.
    assert f"Set max_length={LONGEST}, or train without kd_cache." in error
    assert main([*argv, "--max_length", str(LONGEST)]) == 0


def test_a_teacher_with_block_sparse_attention(tiny, recipe, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = BigBirdConfig(
        is_decoder=True, attention_type="block_sparse", block_size=4, max_position_embeddings=128, **sizes
    )
    BigBirdForCausalLM(config).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(tiny / "teacher").save_pretrained(tmp_path / "teacher")
    argv = ["cache-teacher", "--config", recipe(use_cpu=True), "--kd_teacher", str(tmp_path / "teacher")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "has block-sparse attention" in error and 'Set "attention_type": "original_full"' in error
    content = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**content, "attention_type": "original_full"}))
    assert main(argv) == 0
