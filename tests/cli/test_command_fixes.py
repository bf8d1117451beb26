"""Recipes and commands that a message refuses are accepted once they are changed, or typed, as the message says."""

import importlib
import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
import yaml
from fixes import assert_fixes, edits, refusal
from transformers import AutoTokenizer

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.cli import cache_teacher, doctor, init, plan
from hf_tpu_ext.cli.launch import start_processes
from hf_tpu_ext.cli.main import main
from hf_tpu_ext.cli.recipe import load_recipe, read_recipe
from hf_tpu_ext.cli.recipe_parser import RecipeParser
from hf_tpu_ext.cli.trl_scripts import SCRIPTS
from hf_tpu_ext.hardware.prices import read_prices
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan import compiler
from hf_tpu_ext.report.make import make_report


DATACLASSES = (trl.ScriptArguments, TPUSFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)


def words(options: dict) -> list[str]:
    """The command line of options; those that are `True` have no value, and the others one or several."""
    return [
        word
        for name, value in options.items()
        for word in [f"--{name}", *map(str, value if isinstance(value, list) else [] if value is True else [value])]
    ]


# ---- Recipes ----


@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (dict(env=3), ["such as `env: {PJRT_DEVICE: CPU}`"]),
        (dict(qat="int4"), ["such as `qat: {weight_dtype: int4, group_size: 32}`"]),
        (dict(use_rslora=True), ["Add use_peft: true", "--use_peft true", "leave use_rslora out"]),
        (dict(lora_r=8, use_dora=True), ["Add use_peft: true", "leave lora_r, use_dora out"]),
        (dict(dtype="float"), ["expected one of auto, bfloat16, float16, float32."]),
        (dict(lerning_rate=1e-5), []),
    ],
    ids=str,
)
def test_recipe(tmp_path, settings, fixes):
    path = tmp_path / "recipe.yaml"

    def check(**settings):
        path.write_text(yaml.safe_dump({"use_cpu": True, "output_dir": str(tmp_path), **settings}))
        RecipeParser(DATACLASSES, "sft", "").parse(load_recipe(["--config", str(path)], "data"))

    assert_fixes(check, settings, *fixes)
    if not fixes:
        (name,) = re.findall("Did you mean '(.*)'", refusal(check, settings))
        check(**{name: 1e-5})


def test_a_recipe_with_nothing_in_it_or_with_a_key_twice(tmp_path):
    path = tmp_path / "recipe.yaml"

    def check(text):
        path.write_text(text)
        return load_recipe(["--config", str(path)], "data").file

    line = re.search("A first line: `(.*)`", refusal(check, {"text": ""})).group(1)
    assert check(line) == {"model_name_or_path": "Qwen/Qwen3-0.6B"}
    lines = ["max_steps: 3", "learning_rate: 1", "max_steps: 4"]
    message = refusal(check, {"text": "\n".join(lines)})
    assert "lines 1 and 3. Keep one of them." in message
    check("\n".join(lines[:2]))
    check("\n".join(lines[1:]))
    twice = "qat: {weight_dtype: int4}\nqat_weight_dtype: int8"
    assert "Keep one of them." in refusal(check, {"text": twice})
    for kept in twice.splitlines():
        check(kept)


def test_a_word_that_is_no_option(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("max_steps: 3")
    assert read_recipe([str(path), "--seed", "1"]).file == {"max_steps": 3}
    assert "A recipe is given as: --config recipe" in refusal(lambda argv: read_recipe(argv), {"argv": ["recipe"]})
    assert "expected a path: --config PATH" in refusal(lambda argv: read_recipe(argv), {"argv": ["--config"]})


@pytest.mark.parametrize(("key", "value"), [("num_processes", [2, 3]), ("tpu", True)])
def test_option_of_accelerate(monkeypatch, tmp_path, key, value):
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "launch_command", lambda args: None)
    path = tmp_path / "recipe.yaml"

    def check(**settings):
        path.write_text(yaml.safe_dump({"use_cpu": True, **settings}))
        start_processes("sft", read_recipe(["--config", str(path)]), SCRIPTS["sft"].parser)

    fixes = ["Leave it out"] if key == "tpu" else []
    assert_fixes(check, {key: value}, *fixes)
    if not fixes:
        assert "expected one value: num_processes: VALUE" in refusal(check, {key: value})
        check(**{key: 2})


def test_processes_on_the_cpu(monkeypatch, tmp_path):
    from accelerate.commands import launch

    started = []
    monkeypatch.setattr(launch, "multi_gpu_launcher", started.append)
    path = tmp_path / "recipe.yaml"

    def check(**settings):
        path.write_text(yaml.safe_dump({"backend": "cpu", **settings}))
        start_processes("sft", read_recipe(["--config", str(path)]), SCRIPTS["sft"].parser)

    assert_fixes(check, dict(num_processes=2), "Leave it out", "add --multi_gpu --use_cpu")
    assert [args.num_processes for args in started] == [2]
    one = dict(num_processes=1, multi_gpu=True, use_cpu=True)
    assert_fixes(check, one, "add --multi_gpu false")
    assert "--num_processes 1: multi_gpu is for 2 processes or more" in refusal(check, one)
    assert len(started) == 1
    two = dict(num_processes=2, multi_gpu=True)
    assert_fixes(check, two, "Leave it and num_processes out", "add --multi_gpu --use_cpu", "use_cpu: true")
    assert_fixes(check, dict(two, num_processes=0, use_cpu=True), "--num_processes 2")
    assert_fixes(check, dict(multi_gpu=True, use_cpu=True), "for example --num_processes 2")


# ---- Training commands ----


def parser(command: str) -> RecipeParser:
    return cache_teacher.parser() if command == "cache-teacher" else SCRIPTS[command].parser()


@pytest.fixture
def script(monkeypatch):
    """Runs a script of TRL's up to its first line."""

    def check(command, **options):
        monkeypatch.setattr(importlib.import_module(f"trl.scripts.{command}"), "main", lambda *arguments: None)
        SCRIPTS[command].train(
            read_recipe(words({"use_cpu": True, "output_dir": "unused", **options})), parser(command)
        )

    return check


@pytest.mark.parametrize(
    ("command", "options", "fixes"),
    [
        ("sft", dict(dataset_name="d"), ["For example: --model_name_or_path Qwen/Qwen3-0.6B"]),
        ("sft", dict(model_name_or_path="m"), ["For example: --dataset_name trl-lib/Capybara"]),
        (
            "grpo",
            dict(model_name_or_path="m", dataset_name="d"),
            [
                "--reward_funcs accuracy_reward",
                "--reward_funcs my_rewards.is_short",
                "--reward_model_name_or_path MODEL",
            ],
        ),
        (
            "reward",
            dict(model_name_or_path="m", dataset_name="d", use_peft=True, lora_task_type="CAUSAL_LM"),
            ["Set lora_task_type: SEQ_CLS"],
        ),
    ],
)
def test_training_command(script, tmp_path, monkeypatch, command, options, fixes):
    (tmp_path / "my_rewards.py").write_text("def is_short(completions, **kwargs): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert_fixes(lambda **options: script(command, **options), options, *fixes)


@pytest.fixture
def mixture(script, tmp_path):
    """Runs TRL's script for SFT up to its first line, with a recipe's keys."""

    def check(**keys):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"model_name_or_path": "m", **keys}))
        script("sft", config=path)

    return check


def test_a_part_of_a_stream(mixture):
    keys = dict(datasets=[{"path": "d"}], streaming=True, test_split_size=0.1)
    assert "Leave streaming out, or leave test_split_size out" in refusal(mixture, keys)
    for name in ("streaming", "test_split_size"):
        mixture(**{key: value for key, value in keys.items() if key != name})


def test_a_number_of_rows_to_hold_out(mixture):
    assert_fixes(
        mixture, dict(datasets=[{"path": "json", "data_files": "d"}], test_split_size=10), "test_split_size: 0.1"
    )


def test_keys_of_a_mixture_beside_one_dataset(mixture):
    message = refusal(mixture, dict(dataset_name="d", test_split_size=0.1))
    mixture(**yaml.safe_load(message[message.index("datasets:") :]))
    message = refusal(mixture, dict(dataset_name="d", streaming=True))
    mixture(dataset_name="d", **yaml.safe_load(message[message.index("dataset_streaming:") :]))


def test_a_split_that_the_dataset_does_not_have(monkeypatch, script):
    def load(script_args, training_args, *others):
        {"train": 1, "validation": 2}[script_args.dataset_train_split]
        if training_args.eval_strategy != "no":
            {"train": 1, "validation": 2}[script_args.dataset_test_split]

    def check(**options):
        module = importlib.import_module("trl.scripts.sft")
        monkeypatch.setattr(module, "main", load)
        recipe = read_recipe(words({"use_cpu": True, "output_dir": "unused", **options}))
        SCRIPTS["sft"].train(recipe, parser("sft"))

    options = dict(model_name_or_path="m", dataset_name="d", eval_strategy="epoch")
    assert_fixes(check, options, "leave out eval_strategy")
    assert "dataset_test_split (now 'test')" in refusal(check, options)
    check(**options, dataset_test_split="validation")


class Reached(Exception):
    """All was checked."""


COMPLETE = dict(model_name_or_path="m", dataset_name="d", kd_teacher="t", kd_cache="c")


@pytest.mark.parametrize(
    ("options", "left_out", "fixes"),
    [
        ({}, "model_name_or_path", ["For example: --model_name_or_path Qwen/Qwen3-0.6B"]),
        ({}, "dataset_name", ["For example: --dataset_name trl-lib/Capybara"]),
        ({}, "kd_teacher", ["For example: --kd_teacher Qwen/Qwen3-4B"]),
        ({}, "kd_cache", ["For example: --kd_cache caches/qwen3-4b"]),
        (dict(packing=True), None, ["Set packing=False"]),
        (dict(eval_packing=True), None, ["Set eval_packing=False"]),
        (dict(dataset_streaming=True), None, ["Set dataset_streaming=False"]),
        (dict(streaming=True), None, ["Set streaming=False"]),
        (dict(temperatures=[0, 1]), None, ["For example: --temperatures 1 2"]),
        (dict(batch_size=0), None, ["for example --batch_size 8"]),
    ],
    ids=str,
)
def test_cache_teacher(options, left_out, fixes):
    def check(**options):
        recipe = read_recipe(words({"use_cpu": True, "output_dir": "unused", **options}))
        cache_teacher._check(*parser("cache-teacher").parse(recipe))

    options = {name: value for name, value in (COMPLETE | options).items() if name != left_out}
    assert_fixes(check, options, *fixes)


# ---- Other commands ----


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"seq-lengths": 0}, "for example --seq_lengths 512 1024"),
        ({"jobs": 0}, "for example --jobs 2"),
    ],
    ids=str,
)
def test_options_of_a_plan(options, fix):
    assert_fixes(lambda **options: plan._options(words(options)), options, fix)


def test_graphs_of_a_plan_go_to_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert_fixes(lambda **options: plan._options(words(options)), {"hlo": "file"}, "for example --hlo graphs")


def test_a_plan_needs_shapes(monkeypatch):
    for name in plan._OF_THE_MACHINE:
        # A plan removes them, and here they are to come back.
        monkeypatch.setenv(name, os.environ.get(name, ""))
    # The real one stays for the life of the process.
    tracing = SimpleNamespace(name="xla", kernels=SimpleNamespace())
    monkeypatch.setattr("hf_tpu_ext.backends.selection.select_tracing", lambda *chips: tracing)
    options = {"model_name_or_path": "absent", "topology": "v5e-1"}
    message = refusal(lambda **options: plan.run(words(options)), options)
    (edited,) = edits(options, message, "--seq_lengths 1024")
    # Now it is the model that is missing.
    assert "A plan needs the model's configuration" in refusal(lambda **options: plan.run(words(options)), edited)


def test_a_file_of_the_doctor(tmp_path, monkeypatch):
    class Args:
        full, no_smoke, minutes = False, True, 1

    def check(json):
        args = Args()
        args.json = Path(json)
        doctor.run(args)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_tpu_ext.doctor.machine.examine_machine", lambda: [])
    Path("file").touch()
    assert_fixes(check, {"json": "file/doctor.json"}, "for example --json found.json")
    assert json.loads(Path("found.json").read_text())["ok"]
    assert_fixes(check, {"json": str(tmp_path)}, "for example --json found.json")


def test_each_recipe_that_a_message_lists_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda name: main_args(init.write_recipe, name=name), {"name": "sftt"})
    commands, recipes = re.search(r"Commands: (.*)\. Recipes: (.*)\.", message).groups()
    for name in (*commands.split(", "), *recipes.split(", ")):
        assert main_args(init.write_recipe, name=name) == 0
    recipe = tmp_path / "recipes" / "sft_lora_qwen3.yaml"
    recipe.write_text("mine")
    assert "Rename it" in refusal(lambda name: main_args(init.write_recipe, name=name), {"name": "sft"})
    recipe.rename(recipe.with_name("mine.yaml"))
    assert main_args(init.write_recipe, name="sft") == 0


def main_args(function, **values):
    return function(type("Args", (), values))


@pytest.mark.parametrize("text", ["[", "[]", '{"v5e": 3}'])
def test_prices(tmp_path, text):
    path = tmp_path / "prices.json"

    def check(text):
        path.write_text(text)
        return read_prices(path)

    written = refusal(check, {"text": text}).partition("Write it like this: ")[2]
    assert check(written)["v5e"].source == "my contract"


def test_each_topology_that_a_message_lists_exists():
    message = refusal(lambda name: find_topology(name), {"name": "v5e-9"})
    listed = re.search(r": (v5e-[^:]*)\.$", message).group(1).split(", ")
    assert len(listed) > 10
    for name in (*listed, *re.search(r"Closest: (.*?)\. ", message).group(1).split(", ")):
        find_topology(name)


def test_a_plan_of_several_runs(capsys):
    message = refusal(make_report, {"directories": ["a b", "c"], "plan": "plan.json"})
    command = shlex.split(message.partition("by itself: ")[2])
    assert command == ["hf-tpu", "report", "a b", "--plan", "plan.json"]
    # Now it is the run that is missing.
    assert main(command[1:]) == 2
    assert "a b is not the directory of a run" in capsys.readouterr().err


def test_prompts_of_a_plan_need_a_tokenizer(monkeypatch):
    def reached(*args, **kwargs):
        raise Reached

    def check(**options):
        try:
            plan._prompt_of(read_recipe(words(options)), 4)
        except Reached:
            pass

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", reached)
    assert_fixes(check, {}, "For example: --model_name_or_path Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    ("script", "told"),
    [("kill -9 $$", "compile one graph at a time (--jobs 1)"), ("echo no; exit 3", "failed for v5e-8:\nno")],
)
def test_a_compiler_that_stops(tmp_path, monkeypatch, script, told):
    # In place of the Python that compiles.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(compiler.sys, "executable", str(python))
    program = SimpleNamespace(module=b"", arguments=[])
    assert told in refusal(compiler._compile, {"program": program, "topology": find_topology("v5e-8"), "stop": None})
    # What the message names is an option.
    plan._options(["--jobs", "1"])
