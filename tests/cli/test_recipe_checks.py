"""
A typing error in a recipe is refused before anything that takes seconds is imported. A path that is not there is refused in no time;
what may be a name on the hub is not, unless there is no way to the hub.
"""

import dataclasses
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
import yaml
from datasets import load_dataset
from fixes import refusal
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from hf_tpu_ext import trainers
from hf_tpu_ext.cli import recipe_checks
from hf_tpu_ext.cli.recipe import Recipe
from hf_tpu_ext.cli.recipe_checks import (
    NoSuchPath,
    _names,
    check_adapter_keys,
    check_keys,
    check_mesh,
    check_packages,
    check_paths,
    check_training,
    refuse_unknown,
)
from hf_tpu_ext.cli.recipe_parser import _launcher_actions
from hf_tpu_ext.errors import UserError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rat: 1e-4", "unknown key 'learning_rat' in {recipe}. Did you mean 'learning_rate'?"),
        ("mesh: fdsp", "mesh='fdsp' has an unknown axis 'fdsp'. Axes: data, fsdp. Set mesh='data'"),
        (
            "dataset_streaming: yes",
            "{recipe}: dataset_streaming needs max_steps, since the number of rows of a stream is not known. Set it, for example "
            "--max_steps 1000",
        ),
        ("datasets: [{path: trl-lib/tldr}]\nstreaming: true\nmax_steps: -1", "{recipe}: streaming needs max_steps"),
    ],
)
def test_is_refused_before_heavy_imports(tmp_path, text, words):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{text}\n")
    program = (
        "import sys; from hf_tpu_ext.cli.main import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "sft", "--config", str(recipe)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "2 []\n"
    assert words.format(recipe=recipe) in result.stderr


def test_keys_that_are_called_otherwise_and_keys_that_are_gone():
    known = set(_names())
    for key, meant in recipe_checks._MEANT.items():
        assert re.match(r"'(\w+)", meant)[1] in known, key
    fields = {
        field.name for config in (*CONFIGS, ModelConfig, ScriptArguments) for field in dataclasses.fields(config)
    }
    assert {"learning_rate", "dtype"} <= fields and not recipe_checks._GONE & (fields | recipe_checks._MEANT.keys())


def test_a_template_in_the_place_of_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").touch()

    def check(template):
        check_paths(Recipe(path="recipe.yaml", file={"chat_template_path": template}))

    assert "chat_template_path is a template, and no path." in refusal(
        check, {"template": "{% for message in messages %}"}
    )
    check("template.jinja")


def test_a_recipe_that_is_not_to_train():
    check_training(Recipe(file={"do_train": "true", "do_eval": "true"}))
    with pytest.raises(
        UserError, match="recipe.yaml: do_train is false.*--eval_on_start true --resume_from_checkpoint true"
    ):
        check_training(Recipe(path="recipe.yaml", file={"do_train": "false"}))


def test_quantized_weights_are_trained_by_an_adapter():
    with pytest.raises(UserError, match="recipe.yaml: weights that load_in_4bit quantizes .* Add use_peft: true"):
        check_training(Recipe(path="recipe.yaml", file={"load_in_4bit": "true"}))
    check_training(Recipe(file={"load_in_4bit": "true"}, command_line={"use_peft": True}))


def test_a_stream_with_an_end_is_taken():
    streaming = {"dataset_name": "rows", "dataset_streaming": "true"}
    check_training(Recipe(file=streaming, command_line={"max_steps": "20"}))
    # TRL reads this key beside `datasets` only.
    check_training(Recipe(file={"dataset_name": "rows", "streaming": "true"}))
    with pytest.raises(UserError, match="command line: dataset_streaming needs max_steps"):
        check_training(Recipe(command_line=streaming))


def test_a_mesh_that_is_no_text_is_left_to_the_parser():
    for mesh in (None, True, 8, {"data": 2}, "data=2,fsdp"):
        check_mesh(Recipe(file={"mesh": mesh}))


def test_a_key_that_begins_as_a_known_one_is_taken_for_that():
    recipe = Recipe(command_line={"lora_rank": "8"})
    with pytest.raises(UserError, match="unknown key 'lora_rank' on the command line. Did you mean 'lora_r'?"):
        check_keys(recipe)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lora", ["use_peft"]),
        ("peft", ["use_peft"]),
        ("use_lora", ["use_peft"]),
        ("qlora", ["use_peft", "load_in_4bit"]),
        ("use_qlora", ["use_peft", "load_in_4bit"]),
    ],
)
def test_a_key_of_adapters_by_another_name(key, meant):
    """By its letters `use_lora` is near `use_rslora`, without which nothing says that there is an adapter."""
    recipe = Recipe(command_line={key: "true"})
    names = " and ".join(map(repr, meant))
    with pytest.raises(UserError, match=f"unknown key {key!r} on the command line. Did you mean {names}\\?"):
        check_keys(recipe)
    recipe = Recipe(command_line=dict.fromkeys(meant, "true"))
    check_keys(recipe)
    assert recipe.says_yes("use_peft")


def test_keys_of_lora_are_those_of_trl():
    """Each field of `trl.ModelConfig` that makes a `LoraConfig`."""
    keys = [field.name for field in dataclasses.fields(ModelConfig) if re.search("lora|dora", field.name)]
    assert {"lora_r", "lora_target_modules", "use_rslora", "use_dora"} <= {*keys}
    for key in keys:
        with pytest.raises(UserError, match=f"recipe.yaml: {key} is for LoRA, and without use_peft all weights are"):
            check_adapter_keys(Recipe(path="recipe.yaml", file={key: "8"}))


def test_a_command_line_without_an_adapter_over_a_recipe_with_one():
    file = {"use_peft": "true", "lora_r": 8}
    check_adapter_keys(Recipe(file=file, command_line={"use_peft": "false"}))
    check_adapter_keys(Recipe(file={**file, "use_peft": "false"}))
    with pytest.raises(UserError, match="command line: lora_alpha is for LoRA"):
        check_adapter_keys(Recipe(file={**file, "use_peft": "false"}, command_line={"lora_alpha": "8"}))


def test_a_model_is_named_by_its_path():
    recipe = Recipe(command_line={"model": "Qwen/Qwen3-0.6B"})
    unknown = [(recipe.command_line, "model")]
    with pytest.raises(UserError, match="unknown key 'model' on the command line. Did you mean 'model_name_or_path'?"):
        refuse_unknown(recipe, unknown, ["module", "model_revision", "model_name_or_path"])


CONFIGS = [vars(trainers)[name] for name in trainers.__all__ if name.endswith(("Config", "Arguments"))]


@pytest.mark.parametrize("kind", [*CONFIGS, ModelConfig, ScriptArguments, DatasetMixtureConfig])
def test_every_field_is_known(kind):
    assert {field.name for field in dataclasses.fields(kind)} <= {*_names()}


def test_every_option_of_the_launcher_is_known():
    assert {*_launcher_actions()} <= {*_names()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "tiny" / "model").mkdir(parents=True)
    (tmp_path / "tiny" / "model" / "adapter_config.json").touch()
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("value", "near"),
    [
        ("./tiny/modle", "./tiny/model"),
        ("./row.jsonl", "./rows.jsonl"),
        ("/nowhere/at/all", None),
        ("../chats", None),
        ("runs/sft/checkpoint-4", None),
    ],
)
def test_a_path_that_is_not_there(here, value, near):
    with pytest.raises(UserError) as error:
        check_paths(Recipe(path="recipe.yaml", file={"dataset_name": value}))
    message = str(error.value)
    assert f"recipe.yaml: dataset_name is {value!r}" in message and str(here) in message
    assert ("Did you mean" in message) == (near is not None)
    if near is not None:
        assert f"Did you mean {near!r}?" in message
        assert os.path.exists(near)


@pytest.mark.parametrize("datasets", ["./tiny/modle", ["./tiny/modle"]])
def test_a_path_of_datasets_by_itself(here, datasets):
    with pytest.raises(NoSuchPath, match="a path of datasets is './tiny/modle', and there is no such"):
        check_paths(Recipe(path="recipe.yaml", file={"datasets": datasets}))
    # Without a value on the command line, which the parser refuses.
    check_paths(Recipe(command_line={"datasets": True}))


def test_a_path_of_datasets(here, capsys):
    """As `dataset_name`: datasets would go on with rows of that name that it has kept."""

    def check(**entry):
        check_paths(Recipe(path="recipe.yaml", file={"datasets": [entry]}))

    assert "a path of datasets is './tiny/modle', and there is no such" in refusal(check, {"path": "./tiny/modle"})
    check(path="tinny")
    assert "a path of datasets is 'tinny'" in capsys.readouterr().err
    message = refusal(check, {"path": "rows.jsonl"})
    (entry,) = yaml.safe_load(message[message.index("datasets:\n") :])["datasets"]
    assert entry == {"path": "json", "data_files": "rows.jsonl"}
    check(**entry)


@pytest.mark.parametrize(
    ("value", "near"), [("tiny/modle", "tiny/model"), ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B"), ("tinny", "tiny")]
)
def test_a_name_that_is_close_to_a_path_gets_a_line(here, capsys, value, near):
    (here / "Qwen" / "Qwen3-0.6B").mkdir()
    check_paths(Recipe(path="recipe.yaml", file={"model_name_or_path": value}))
    said = capsys.readouterr().err
    assert f"recipe.yaml: model_name_or_path is {value!r}, and there is no such file or directory in {here}" in said
    assert f"It is looked for on the hub. Did you mean {near!r}?" in said


@pytest.mark.parametrize(
    "value",
    ["tiny/model", "Qwen/Qwen3-0.6B", "trl-lib/Capybara", "base", "gs://bucket/no/rows.jsonl"],
)
def test_what_is_there_or_may_be_on_the_hub(here, capsys, value):
    for key in ("dataset_name", "model_name_or_path", "kd_teacher")[value == "base" :]:
        check_paths(Recipe(command_line={key: value}))
    assert capsys.readouterr().err == ""


def test_without_a_way_to_the_hub(here, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # Nobody listens there.
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
        recipe = Recipe(path="recipe.yaml", file={"model_name_or_path": "tiny/modle"})
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        check_paths(recipe)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        with pytest.raises(
            UserError, match="cannot be reached, and nothing of that name .* Did you mean 'tiny/model'?"
        ):
            check_paths(recipe)
        (here / "hub" / "models--tiny--modle").mkdir(parents=True)
        check_paths(recipe)
        taken.listen()
        check_paths(Recipe(file={"model_name_or_path": "tiny/other"}))


def test_data_that_is_gone_gets_a_line(here, capsys):
    """Of a directory that was there, datasets goes on with the rows that it has kept."""
    (here / "chats").mkdir()
    check_paths(Recipe(command_line={"dataset_name": "chats"}))
    assert capsys.readouterr().err == ""
    (here / "chats").rmdir()
    check_paths(Recipe(command_line={"dataset_name": "chats"}))
    assert "dataset_name is 'chats', and there is no such file or directory" in capsys.readouterr().err


def test_data_in_a_file(here):
    with pytest.raises(UserError) as error:
        check_paths(Recipe(command_line={"dataset_name": "rows.jsonl"}))
    commands, _, option = str(error.value).partition("Put it into one: ")[2].partition(", and then --dataset_name ")
    subprocess.run(commands, shell=True, check=True)
    assert (here / option / "train.jsonl").read_text() == "{}"
    check_paths(Recipe(command_line={"dataset_name": option}))


@pytest.mark.parametrize("name", ["train", "test", "validation"])
def test_data_in_a_file_of_a_split(here, name):
    """It stays beside the other splits. Of the directory `.`, `load_dataset` makes nothing."""
    (here / "my data").mkdir()
    (here / "my data" / f"{name}.jsonl").write_text('{"text": "a"}\n')
    message = refusal(lambda **keys: check_paths(Recipe(command_line=keys)), {"dataset_name": f"my data/{name}.jsonl"})
    assert "mkdir" not in message
    (directory,) = shlex.split(message.partition("--dataset_name ")[2])
    check_paths(Recipe(command_line={"dataset_name": directory}))
    assert [*load_dataset(directory, cache_dir=str(here / "cache"))] == [name]
    (here / f"{name}.jsonl").write_text("{}")
    for file in (f"{name}.jsonl", f"./{name}.jsonl"):
        assert "mkdir" in refusal(lambda **keys: check_paths(Recipe(command_line=keys)), {"dataset_name": file})


def test_a_chat_template_that_is_not_there(here, monkeypatch):
    """A file is never looked for on the hub; what has another name may be a model there, whose template is taken."""
    monkeypatch.setattr("hf_tpu_ext.cli.recipe_checks._reaches", lambda address: True)
    (here / "chat.jinja").write_text("")

    def check(**file):
        check_paths(Recipe(path="recipe.yaml", file=file))

    for value, near in [("chta.jinja", "chat.jinja"), ("nix.jinja", None), ("other/nix.j2", None), ("./nix", None)]:
        message = refusal(check, {"chat_template_path": value})
        assert f"recipe.yaml: chat_template_path is {value!r}, and there is no such file or directory in" in message
        assert re.findall("Did you mean '(.*)'", message) == [near] * (near is not None)
    for value in ("chat.jinja", "tiny/model", "Qwen/Qwen3-0.6B"):
        check(chat_template_path=value)


def test_data_that_nothing_reads(here):
    check_paths(
        Recipe(command_line={"dataset_name": "./no.jsonl", "model_name_or_path": "tiny/model"}), reads_data=False
    )


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model", "tekken.json"]
)
def test_a_model_without_its_tokenizer(here, name):
    """Of a Llama's configuration alone upstream makes a tokenizer without words, and trains on what that makes of a text."""
    recipe = Recipe(path="recipe.yaml", file={"model_name_or_path": "tiny/model"})
    (here / "tiny" / "model" / "config.json").write_text("{}")
    (here / "tiny" / "model" / "generation_config.json").write_text("{}")
    with pytest.raises(
        NoSuchPath, match="recipe.yaml: the directory 'tiny/model' .* no tokenizer. Copy the model's own"
    ):
        check_paths(recipe)
    (here / "tiny" / "model" / name).write_text("{}")
    check_paths(recipe)


def test_few_bits_without_bitsandbytes(monkeypatch):
    """Upstream's ImportError comes when the model is loaded, and names a package that this one has an extra for."""
    recipe = Recipe(path="recipe.yaml", file={"load_in_4bit": "yes", "load_in_8bit": "false"})
    check_packages(recipe)
    monkeypatch.setattr(recipe_checks, "find_spec", {}.get)
    message = refusal(lambda **options: check_packages(Recipe(path="recipe.yaml", file=options)), recipe.file)
    assert message.startswith("recipe.yaml: load_in_4bit needs bitsandbytes, which is not installed: pip install ")
    assert "[qlora]" in message
    check_packages(Recipe(file={"load_in_4bit": "no"}))


def test_data_by_the_name_of_a_format(here, monkeypatch):
    """`load_dataset` takes it for the format, and all files of that kind below the working directory for the data."""
    from datasets import load_dataset

    for directory, text in (("json", "a"), ("old", "b")):
        (here / directory).mkdir()
        (here / directory / "train.jsonl").write_text(f'{{"text": "{text}"}}\n')
    assert len(load_dataset("json", split="train")) == 2

    def check(**file):
        check_paths(Recipe(path="recipe.yaml", file=file))

    message = refusal(check, {"dataset_name": "json"})
    assert "recipe.yaml: dataset_name is 'json', which load_dataset takes for the format" in message
    path = message.partition("Write the directory as '")[2].partition("'")[0]
    check(dataset_name=path)
    assert load_dataset(path, split="train")["text"] == ["a"]
    assert "Write the directory as './json'" in refusal(check, {"datasets": [{"path": "json"}]})
    message = refusal(check, {"dataset_name": "csv"})
    (entry,) = yaml.safe_load(message[message.index("datasets:\n") :])["datasets"]
    assert entry == {"path": "csv", "data_files": "FILE"}


@pytest.mark.parametrize("files", ["row.jsonl", ["rows.jsonl", "row.jsonl"], {"train": "row.jsonl"}], ids=str)
def test_a_file_of_datasets_that_is_not_there(here, files):
    def check(**entry):
        check_paths(Recipe(path="recipe.yaml", file={"datasets": [entry]}))

    message = refusal(check, {"path": "json", "data_files": files})
    assert "data_files has 'row.jsonl', and there is no such file" in message
    assert "Did you mean 'rows.jsonl'?" in message
    for files in ("rows.jsonl", "*.jsonl", "gs://bucket/rows.jsonl"):
        check(path="json", data_files=files)
    check(path="owner/of-the-hub", data_files="row.jsonl")


def test_a_directory_without_a_model(here):
    def check(**file):
        check_paths(Recipe(path="recipe.yaml", file=file))

    (here / "run").mkdir()
    message = refusal(check, {"model_name_or_path": "run"})
    assert "recipe.yaml: model_name_or_path is 'run', a directory without a model. It has a config.json" in message
    for step in (90, 100):
        (here / "run" / f"checkpoint-{step}").mkdir()
        (here / "run" / f"checkpoint-{step}" / "adapter_config.json").touch()
    message = refusal(check, {"kd_teacher": "run"})
    assert message.endswith("Name a checkpoint in it: kd_teacher: run/checkpoint-100")
    check(**yaml.safe_load(message.partition("in it: ")[2]))
