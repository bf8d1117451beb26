"""What a trainer refuses is accepted once data, settings or files are changed as the message says."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import trl
from datasets import Dataset
from fixes import assert_fixes, refusal
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, get_peft_model
from preference import Case, rows_for, trainer_for
from rollouts import Case as RolloutCase
from rollouts import trainer_for as rollout_trainer_for
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig

from hf_tpu_ext import TPUDPOConfig, TPUDPOTrainer, TPUGRPOTrainer, TPUSFTConfig
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.quantization.fake_quantized import QUANTIZATION_FILE, TrainedFor
from hf_tpu_ext.trainers.checkpoint.base_record import BASE_FILE, find_differences
from hf_tpu_ext.trainers.checkpoint.lookup import find_checkpoint
from hf_tpu_ext.trainers.checks.datasets import check_dataset, refuse_images
from hf_tpu_ext.trainers.checks.field_answers import Place
from hf_tpu_ext.trainers.checks.fields import adapt
from hf_tpu_ext.trainers.checks.preferences import check_preferences
from hf_tpu_ext.trainers.checks.settings import absent_modules_of_adapter, check_adapter, check_architecture
from hf_tpu_ext.trainers.checks.upstream import check_trainer
from hf_tpu_ext.trainers.online.checkpoints import RolloutCheckpoints
from hf_tpu_ext.trainers.run.chips import Chips


SIZES = dict(
    vocab_size=300,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
)
LEAVE_OUT = "eave it out"


# ---- Data: the messages hold Python ----


def expression(message: str) -> str:
    """The call of a dataset's method that a message ends with."""
    return re.search(r"dataset\.\w+\(.*\)", message).group(0)


ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}
SAID = [{"role": "assistant", "content": "b"}]
SILENT = [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    "bad",
    [
        {**ROW, "rejected": None},
        {**ROW, "chosen": ""},
        {**ROW, "rejected": "b"},
    ],
    ids=str,
)
def test_pairs(bad):
    check = lambda dataset: check_preferences(dataset, "train_dataset", "DPOTrainer")  # noqa: E731
    dataset = Dataset.from_list([ROW, bad])
    left = eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset})
    assert len(left) == 1
    check(left)


def test_messages_without_content():
    check = lambda dataset: check_preferences(dataset, "train_dataset", "RewardTrainer")  # noqa: E731
    dataset = Dataset.from_list([{"chosen": SAID, "rejected": SILENT}, {"chosen": SAID, "rejected": SAID[:1] * 2}])
    check(eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset}))


def test_labels_that_are_missing():
    check = lambda dataset: check_preferences(dataset, "train_dataset", "KTOTrainer")  # noqa: E731
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (False, None, True)]
    dataset = Dataset.from_list(rows)
    left = eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset})
    # A label that is false is one.
    assert left["label"] == [False, True]
    check(left)


def test_columns_are_looked_for_on_every_device(tmp_path):
    """Before a model is loaded."""
    dataset = Dataset.from_list([{"prompt": "a", "chosen": "b", "bad": "c"}])
    args = TPUDPOConfig(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="'rejected' is missing. Rename a column"):
        TPUDPOTrainer("no/such-model", args=args, train_dataset=dataset)


@pytest.mark.parametrize(
    ("trainer", "columns", "renamed"),
    [
        ("DPOTrainer", ["prompt", "chosen", "bad"], {"bad": "rejected"}),
        ("KTOTrainer", ["prompt", "completion", "good"], {"good": "label"}),
        ("KTOTrainer", ["prompt", "good", "bad"], {"good": "chosen", "bad": "rejected"}),
        ("DPOTrainer", ["prompt", "completion", "label"], None),
    ],
)
def test_columns_of_preferences(trainer, columns, renamed):
    dataset = Dataset.from_list([{column: f"{column} of a row" for column in columns}])
    check = lambda dataset, trainer: check_preferences(dataset, "train_dataset", trainer)  # noqa: E731
    message = refusal(check, {"dataset": dataset, "trainer": trainer})
    if renamed is None:
        assert "Train on it with KTOTrainer (trl kto)" in message
        check(dataset, "KTOTrainer")
    else:
        assert "Rename a column" in message and all(repr(name) in message for name in renamed.values())
        check(dataset.rename_columns(renamed), trainer)


@pytest.mark.parametrize("trainer", ["DPOTrainer", "KTOTrainer"])
def test_messages_of_pairs_without_a_prompt(trainer):
    check = lambda dataset: check_preferences(dataset, "train_dataset", trainer)  # noqa: E731
    asked, other = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "c"}]
    pair = {"chosen": SAID, "rejected": other}
    assert "Add a column 'prompt', or begin both" in refusal(check, {"dataset": Dataset.from_list([pair])})
    check(Dataset.from_list([{**pair, "prompt": asked}]))
    check(Dataset.from_list([{column: asked + answer for column, answer in pair.items()}]))
    dataset = Dataset.from_list([{**pair, "asked": asked}])
    check(eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset}))


def test_columns_of_text(runs):
    config = runs.config()
    dataset = Dataset.from_list([{"question": "a?", "answer": "b"}] * 2)

    def check(dataset_text_field="text", dataset=dataset, formatting_func=None):
        config.dataset_text_field = dataset_text_field
        check_dataset(dataset, "train_dataset", config, formatting_func is not None)

    assert_fixes(check, {"dataset_text_field": "text"}, "for example dataset_text_field='question'")
    check(formatting_func=lambda row: row["question"])
    check(dataset=dataset.rename_column("question", "text"))
    texts = dataset.select_columns("question").rename_column("question", "conversations")
    check(dataset=texts, dataset_text_field="conversations")
    assert "for example dataset_text_field='conversations'" in refusal(check, {"dataset": texts})
    empty = Dataset.from_list([{"text": "a"}, {"text": None}])
    check(dataset=eval(expression(refusal(check, {"dataset": empty})), {"dataset": empty}))


ASKED_AND_SAID = [{"role": "user", "content": "a"}, *SAID]
SHAREGPT = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"conversation": ASKED_AND_SAID}, ["messages"]),
        ({"conversations": ASKED_AND_SAID, "id": "one"}, ["messages", "id"]),
        ({"conversations": [*ASKED_AND_SAID, {**SAID[0], "tags": ["a", 1]}]}, ["messages"]),
        ({"source": "a", "conversation": SHAREGPT, "id": "one"}, ["source", "conversations", "id"]),
        ({"turns": ASKED_AND_SAID}, ["messages"]),
        ({"question": "a", "answer": "b"}, ["prompt", "completion"]),
        ({"question": "a", "answer": "b", "year": 2020}, ["prompt", "completion", "year"]),
        ({"prompt": "a", "answer": "b"}, ["prompt", "completion"]),
        ({"answer": "b", "prompts": "a"}, ["completion", "prompt"]),
        ({"promt": SAID, "completions": SAID}, ["prompt", "completion"]),
        ({"txt": "a", "id": "one"}, ["text", "id"]),
        ({"inputs_ids": [5, 6]}, ["input_ids"]),
    ],
    ids=str,
)
def test_columns_with_other_names(runs, row, columns):
    """They are refused before a model is loaded, and prepared by upstream once they are renamed."""
    dataset = Dataset.from_list([row] * 2, on_mixed_types="use_json")
    check = lambda dataset: check_dataset(dataset, "train_dataset", runs.config(), False)  # noqa: E731
    renamed = eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset})
    assert renamed.column_names == columns
    trainer = runs.ours(train=False, kwargs={"train_dataset": renamed, "eval_dataset": None})
    assert len(trainer.train_dataset) == 2


@pytest.mark.parametrize("first", ["text", "messages"])
@pytest.mark.parametrize("columns", [("prompt", "completion"), ("prompt", "chosen", "rejected")], ids=["sft", "dpo"])
def test_rows_of_text_beside_rows_of_messages(runs, columns, first):
    """Upstream takes all for what the first is, and gives the others no end, or fails."""
    said = {
        "text": {column: f"{column} of a row" for column in columns},
        "messages": {column: [{"role": "user", "content": column}] for column in columns},
    }
    (other,) = {*said} - {first}
    dataset = Dataset.from_list([said[first], said[other], said[first]], on_mixed_types="use_json")

    def check(dataset, compiles=False):
        if "chosen" in columns:
            check_preferences(dataset, "train_dataset", "RewardTrainer", compiles)
        else:
            check_dataset(dataset, "train_dataset", runs.config(), False)

    message = refusal(check, {"dataset": dataset})
    assert (
        message.startswith("Row 1 of train_dataset (the first is row 0): '") and "one of both in all rows" in message
    )
    assert refusal(check, {"dataset": dataset, "compiles": True}) == message
    left = eval(expression(message), {"dataset": dataset})
    assert len(left) == 2
    check(left)


@pytest.mark.parametrize("wrapped", [False, True], ids=["config", "model"])
@pytest.mark.parametrize("kind", ["SHIRA", "FROD"])
def test_adapters_of_sparse_tensors(tiny_model, kind, wrapped):
    """Each of the adapters of a model, or that which a trainer would add to it."""
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip(f"peft {peft.__version__} has no {kind}")
    settings = {"r": 2} if kind == "SHIRA" else {}
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind](target_modules=["q_proj"], **settings)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    given = {"model": get_peft_model(model, config)} if wrapped else {"model": model, "peft_config": config}
    message = refusal(lambda **settings: check_adapter(settings), given)
    assert "peft_config=LoraConfig(...)" in message and "use_cpu=True" in message
    check_adapter({"model": model, "peft_config": LoraConfig(target_modules=["q_proj"])})


def test_modules_that_an_adapter_names_and_a_model_lacks(tiny_model):
    """PEFT trains without them, and says nothing."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = LoraConfig(target_modules=["q_proj", "v_prjo"], modules_to_save=["lm_haed"])
    of_target, of_saved = absent_modules_of_adapter(get_peft_model(model, config))
    assert "target_modules of the adapter names 'v_prjo'" in of_target and "Did you mean 'v_proj'?" in of_target
    assert "modules_to_save of the adapter names 'lm_haed'" in of_saved and "Did you mean 'lm_head'?" in of_saved
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model)
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["self_attn.q_proj"])
    assert list(absent_modules_of_adapter(get_peft_model(model, config))) == []


def test_the_start_of_a_run_names_a_module_that_the_model_lacks(runs, capsys):
    runs.ours(lora={"target_modules": ["q_proj", "v_prjo"]}, max_steps=1)
    assert "\n  target_modules of the adapter names 'v_prjo'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "fixes"),
    [
        ("q_prj", ["lora_target_modules: '.*[.]q_proj'", "lora_target_modules: all-linear"]),
        # TRL makes a word of a list of one.
        ("v_proj", ["lora_target_modules: '.*[.]v_proj'", "lora_target_modules: all-linear"]),
        (["q_prj", "v_prj"], ["lora_target_modules: [q_proj, v_proj]"]),
        (["zzz"], ["lora_target_modules: all-linear"]),
    ],
    ids=str,
)
def test_layers_that_an_adapter_does_not_find(check, runs, target, fixes):
    def made(lora_target_modules):
        check(lora={"target_modules": lora_target_modules})

    assert_fixes(made, {"lora_target_modules": target}, *fixes)
    message = refusal(made, {"lora_target_modules": target})
    assert "Its linear layers are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head." in message


def test_a_model_that_peft_has_no_layers_for(runs, tmp_path):
    """The name of one, which upstream loads."""
    config = AutoConfig.for_model("olmo2", eos_token_id=None, **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "olmo2")

    def made(lora_target_modules=None):
        runs.ours(str(tmp_path / "olmo2"), {"target_modules": lora_target_modules}, train=False)

    assert "is not set, and PEFT has no default for this model" in refusal(made, {})
    assert_fixes(made, {}, "Set lora_target_modules: all-linear")


def test_name_of_a_reference_model(tiny_model):
    """The trainer refuses it, and takes what the message says to pass."""
    rows = Dataset.from_list([ROW] * 2)
    args = TPUDPOConfig("unused", report_to="none", use_cpu=True)
    with pytest.raises(UserError) as error:
        TPUDPOTrainer(str(tiny_model), ref_model=str(tiny_model), args=args, train_dataset=rows)
    call = re.search(r"ref_model=(AutoModel\S+\))\.$", str(error.value)).group(1)
    check_trainer(TPUDPOTrainer, {"ref_model": eval(call)}, compiles=False)


def test_columns_of_images():
    check = lambda dataset: refuse_images(dataset, "train_dataset", "RewardTrainer")  # noqa: E731
    dataset = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})
    check(eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset}))


def test_columns_of_prompts(runs):
    def check(dataset):
        TPUGRPOTrainer.check_trainer_kwargs({"args": runs.config(), "train_dataset": dataset})

    dataset = Dataset.from_dict({"question": ["a"]})
    check(eval(expression(refusal(check, {"dataset": dataset})), {"dataset": dataset}))


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_paged", "use_transformers_continuous_batching"])
def test_ways_to_generate(runs, name):
    def check(**settings):
        config = GRPOConfig(str(runs.output_dir), bf16=False)
        vars(config).update(settings)
        adapt(config, Place())

    assert_fixes(check, {name: True}, f"Set {name}=False")


@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_tools(runs, name):
    assert_fixes(lambda **given: adapt(runs.config(), Place(), given), {name: [len]}, LEAVE_OUT)


# ---- Trainers ----


@pytest.fixture
def check(runs):
    """Makes a trainer, with arguments of the config and of the trainer."""

    def make(lora=None, **settings):
        given = {
            name: settings.pop(name)
            for name in ("train_dataset", "eval_dataset", "data_collator", "compute_loss_func")
            if name in settings
        }
        return runs.ours(config_cls=TPUSFTConfig, train=False, lora=lora, kwargs=given, **settings)

    return make


def test_length_of_a_row(check):
    rows = Dataset.from_list([{"prompt": "a long question?", "completion": " yes"}] * 4)
    message = refusal(check, {"train_dataset": rows, "max_length": 8})
    assert "Set a greater max_length" in message
    check(train_dataset=rows, max_length=24)


def test_samples_of_an_evaluation_set(check, runs):
    settings = {"show_samples": 1, "eval_dataset": None}
    assert_fixes(check, settings, "leave show_samples out")
    assert "Pass one eval_dataset" in refusal(check, settings)
    check(show_samples=1)


def test_chat_template_without_generation_markers(check, runs, rows, tmp_path, monkeypatch):
    # Where the fix looks for it.
    monkeypatch.chdir(tmp_path)
    template = runs.tokenizer.chat_template
    bare = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert bare != template
    Path("template.jinja").write_text(template)
    runs.tokenizer.chat_template = bare
    chats = rows(4).map(
        lambda row: {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ],
            "prompt": None,
            "completion": None,
        },
    )
    chats = chats.remove_columns(["prompt", "completion"])
    data = {"train_dataset": chats, "eval_dataset": None, "max_length": 96}
    assert_fixes(
        lambda **settings: check(**data, **settings),
        {"assistant_only_loss": True},
        "leave assistant_only_loss out",
    )
    message = refusal(lambda **settings: check(**data, **settings), {"assistant_only_loss": True})
    (path,) = re.findall("chat_template_path='(.*?)'", message)
    check(**data, assistant_only_loss=True, chat_template_path=path)


@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_messages_without_a_chat_template(check, runs, tiny_model, tmp_path, monkeypatch, assistant_only_loss):
    # Where the fixes look for it.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "Qwen/Qwen3-0.6B")
    Path("template.jinja").write_text(runs.tokenizer.chat_template)
    chats = Dataset.from_list([{"messages": ASKED_AND_SAID}] * 4)
    settings = {"train_dataset": chats, "eval_dataset": None, "assistant_only_loss": assistant_only_loss}

    def made(**settings):
        runs.tokenizer.chat_template = None
        check(**settings)

    fixes = ["chat_template_path='template.jinja'", "chat_template_path='Qwen/Qwen3-0.6B'"]
    assert_fixes(made, settings, *fixes)
    assert f"he tokenizer of {str(tiny_model)!r} has no chat template" in refusal(made, settings)
    # Text needs none.
    made(train_dataset=runs.train_dataset)


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_messages_of_preferences_without_a_chat_template(xla, tiny_model, tmp_path, kind):
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()

    def made(**settings):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        case = Case(kind, {**settings, "max_length": 96}, data="conversation")
        given = {"train_dataset": rows_for(kind, "conversation", 4), "processing_class": tokenizer}
        trainer_for(case, tmp_path, ours=True, **given)

    message = refusal(made, {})
    assert f"holds messages, and the tokenizer of {str(directory)!r} has no chat template" in message
    (tmp_path / "template.jinja").write_text(template)
    if kind == "reward":
        assert "Give one: chat_template_path='template.jinja'" in message
        made(chat_template_path=str(tmp_path / "template.jinja"))
    else:
        assert "Put one into the directory of the model, as chat_template.jinja; or, in Python" in message
        (directory / "chat_template.jinja").write_text(template)
        made()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": SHAREGPT}, "column 'conversations', of messages with 'from' and 'value'"),
        ({"text": "a"}, "column 'text', of text"),
        ({"prompt": "a", "completion": "b"}, "columns 'prompt' and 'completion', of text"),
        ({"input_ids": [5, 6]}, "column 'input_ids', of tokens"),
    ],
    ids=str,
)
def test_answers_without_roles(check, row, words):
    """Those of an evaluation set are taken, as upstream takes them."""
    dataset = Dataset.from_list([row] * 4)
    settings = {"train_dataset": dataset, "eval_dataset": None, "assistant_only_loss": True}
    assert_fixes(check, settings, "eave assistant_only_loss out")
    message = refusal(check, settings)
    assert f"train_dataset is trained on by its {words}" in message
    chats = Dataset.from_list([{"messages": ASKED_AND_SAID}] * 4)
    check(train_dataset=chats, eval_dataset=dataset, assistant_only_loss=True)
    if "conversations" in row:
        converted = eval(expression(message), {"dataset": dataset, "trl": trl})
        assert converted.column_names == ["messages"]
        check(**{**settings, "train_dataset": converted})
    # Beside messages with roles, upstream reads those.
    if "prompt" not in row:
        check(**{**settings, "train_dataset": Dataset.from_list([{**row, "messages": ASKED_AND_SAID}] * 4)})


def test_text_to_predict(check):
    for settings in ({"packing": True}, {"eval_packing": True}):
        assert_fixes(
            check, {"predict_with_generate": True, **settings}, "Set eval_packing=False and padding_free=False"
        )


@pytest.mark.ci
def test_layers_that_cannot_be_a_loop(check):
    def train(**settings):
        trainer = check(max_steps=1, **settings)
        trainer.train()

    assert_fixes(train, {"scan_layers": "on", "optim": "adafactor"}, LEAVE_OUT, "set it to 'auto'")


@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (dict(kd_teacher="base"), ["Train with LoRA (use_peft: true", "kd_teacher=MODEL"]),
        (
            dict(kd_teacher="student"),
            ["train with LoRA (use_peft: true) and set kd_teacher='base'", "Set kd_teacher to another model"],
        ),
        (dict(kd_teacher="TEACHER", kd_top_k=1000), ["Set kd_top_k to 1...259", LEAVE_OUT]),
        (
            dict(kd_teacher="TEACHER", compute_loss_func=len),
            ["Leave compute_loss_func out", "leave kd_teacher and kd_cache out"],
        ),
    ],
    ids=str,
)
def test_teacher(check, runs, teacher, settings, fixes):
    def made(use_peft=False, **settings):
        named = {"TEACHER": teacher, "MODEL": teacher, "another": teacher, "student": str(runs.model_dir)}
        if "kd_teacher" in settings:
            settings["kd_teacher"] = named.get(settings["kd_teacher"], settings["kd_teacher"])
        check(lora={} if use_peft else None, **settings)

    assert_fixes(made, settings, *fixes)


def test_rounding_of_what_is_rounded(check, wide_model):
    from transformers import BitsAndBytesConfig

    def made(quantization_config=None, **settings):
        kwargs = {} if quantization_config is None else {"quantization_config": quantization_config}
        model = AutoModelForCausalLM.from_pretrained(wide_model, **kwargs)
        check(model=model, lora={} if kwargs else None, **settings)

    settings = {"qat_weight_dtype": "int4", "quantization_config": BitsAndBytesConfig(load_in_4bit=True)}
    message = refusal(made, settings)
    assert "Leave out load_in_4bit, load_in_8bit and quantization_config" in message
    made(qat_weight_dtype="int4")


@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (dict(qat_group_size=64), ["one of 16, 8, 4, 2."]),
        (dict(qat_quantize_embedding=True, modules_to_save=["lm_head"]), ["set qat_quantize_embedding=False"]),
        (dict(use_dora=True), ["Set qat_adapters='beside'"]),
    ],
    ids=str,
)
def test_rounding(check, settings, fixes):
    def made(**settings):
        lora = {name: settings.pop(name) for name in ("modules_to_save", "use_dora") if name in settings}
        check(qat_weight_dtype="int4", lora=lora or None, **{"qat_group_size": 16, **settings})

    assert_fixes(made, settings, *fixes)


# ---- Text that is generated while training ----


def test_prompts_that_are_too_long(xla, tmp_path):
    rows = Dataset.from_dict({"prompt": ["abc", "ab", "abcdefgh"]})

    def check(**settings):
        rollout_trainer_for(RolloutCase("grpo", settings), tmp_path, True, train_dataset=rows)

    assert_fixes(check, {"max_prompt_length": 4}, "Set max_prompt_length=8")


def test_too_few_rows_for_a_generation(xla, tmp_path):
    def check(count, **settings):
        rows = Dataset.from_dict({"prompt": ["abc", "ab", "abcd", "a"][:count]})
        trainer = rollout_trainer_for(RolloutCase("grpo", settings), tmp_path, True, train_dataset=rows)
        trainer.get_train_dataloader()

    settings = {"count": 2, "per_device_train_batch_size": 4, "steps_per_generation": 4}
    message = refusal(check, settings)
    assert "train_dataset has 2 rows, and a generation takes 4, so there would be no step" in message
    for fix in ({"count": 4}, {"steps_per_generation": 1}):
        check(**{**settings, **fix})


# ---- Preferences ----


def test_no_row_is_left(xla, tmp_path):
    rows = rows_for("dpo").map(lambda row: {"prompt": row["prompt"] + "a" * 3})

    def check(**settings):
        trainer_for(Case("dpo", settings), tmp_path, ours=True, train_dataset=rows)

    message = refusal(check, {"max_length": 3})
    (longer,) = re.findall(r"for example (max_length=\d+)", message)
    assert_fixes(check, {"max_length": 3}, longer)


# ---- Files ----


def test_a_checkpoint_that_is_not_there(tmp_path):
    def check(resume_from_checkpoint=None, output_dir=str(tmp_path / "run")):
        return find_checkpoint(resume_from_checkpoint, output_dir)

    assert_fixes(check, {"resume_from_checkpoint": True}, "Leave resume_from_checkpoint out")


def test_a_file_that_is_damaged(tmp_path):
    model = torch.nn.Linear(2, 2)
    for name, read in (
        (BASE_FILE, lambda: find_differences(tmp_path, model)),
        (QUANTIZATION_FILE, lambda: TrainedFor.read(tmp_path)),
    ):
        (tmp_path / name).write_text("{")
        command = refusal(read, {}).partition("without it: ")[2]
        subprocess.run(shlex.split(command), check=True)
        assert read() is None


# ---- Another number of chips than a checkpoint was written on, and other rare things ----


def test_rows_of_a_checkpoint_of_more_chips(caplog):
    """12 rows of 4 chips: 5 chips cannot take them."""

    def check(
        num_chips,
        per_device_train_batch_size=3,
        backend="xla",
        accumulation=1,
        drop_last=False,
        sampling="random",
        keeps_accumulation=False,
    ):
        args = SimpleNamespace(
            per_device_train_batch_size=per_device_train_batch_size,
            train_batch_size=per_device_train_batch_size * num_chips,
            world_size=1,
            gradient_accumulation_steps=accumulation,
            dataloader_drop_last=drop_last,
            train_sampling_strategy=sampling,
        )
        chips = SimpleNamespace(
            _args=args,
            _backend=SimpleNamespace(name=backend),
            _num_workers=num_chips,
            rows_per_step=per_device_train_batch_size * num_chips * accumulation,
            recipe_rows=per_device_train_batch_size,
        )
        state = {"rows_per_step": 12, "num_workers": 4, "recipe_rows": 3, "rows_at_once": 12}
        Chips.keep_rows_per_step(chips, state, keeps_accumulation)
        return args.per_device_train_batch_size * num_chips * args.gradient_accumulation_steps

    message = refusal(check, {"num_chips": 5})
    assert "Set num_chips to a number that divides 12, or set another per_device_train_batch_size" in message
    assert check(4) == 12
    for num_chips in (1, 2, 3, 6, 12):
        for accumulation in (1, 2, 5):
            assert check(num_chips, accumulation=accumulation) == 12
    # Where the loss grows with micro-steps, their number stays.
    message = refusal(check, {"num_chips": 12, "accumulation": 2, "keeps_accumulation": True})
    assert "Set num_chips to a number that divides 6, or" in message
    for num_chips in (1, 2, 3, 6):
        assert check(num_chips, accumulation=2, keeps_accumulation=True) == 12
    for drop_last in (False, True):
        caplog.clear()
        check(2, drop_last=drop_last)
        assert ("an epoch may have another number of steps" in caplog.text) == drop_last
        # Where the recipe keeps the global batch size by itself.
        caplog.clear()
        assert check(2, accumulation=2, drop_last=drop_last) == 12
        assert ("an epoch may have another number of steps" in caplog.text) == drop_last
    for sampling in ("random", "group_by_length"):
        caplog.clear()
        check(2, sampling=sampling)
        assert ("To go on as before, resume on 4 chips" in caplog.text) == (sampling == "group_by_length")
    check(5, per_device_train_batch_size=2)
    message = refusal(check, {"num_chips": 5, "backend": "cpu"})
    assert "on 4 devices, which 5 devices cannot keep" in message and "Set num_processes to a number" in message


def test_batch_size_that_is_found_for_too_few_rows():
    def check(rows, num_chips=4, auto_find_batch_size=False):
        if not auto_find_batch_size:
            return None
        return Chips.rows_at_once(SimpleNamespace(_backend=SimpleNamespace(num_chips=num_chips)), rows)

    assert_fixes(check, {"rows": 3, "auto_find_batch_size": True}, "leave auto_find_batch_size out")


def test_generation_of_a_checkpoint_of_more_chips():
    def check(rows_at_once, backend="xla"):
        trainer = SimpleNamespace(
            args=SimpleNamespace(), backend=SimpleNamespace(name=backend), _rows_of_micro_step=rows_at_once
        )
        RolloutCheckpoints._keep_generation(trainer, 12, 4)

    message = refusal(check, {"rows_at_once": 8})
    assert "Set num_chips to a number that divides 12, or set another per_device_train_batch_size" in message
    for rows_at_once in (1, 2, 3, 4, 6, 12):
        check(rows_at_once)
    message = refusal(check, {"rows_at_once": 8, "backend": "cpu"})
    assert "on 4 devices, which do not divide" in message and "Set num_processes to a number" in message


def test_a_model_whose_class_is_not_known(tiny_model, tmp_path, runs):
    path = Path(shutil.copytree(tiny_model, tmp_path / "model")) / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))

    def check():
        check_architecture(runs.config(), {"model": str(path.parent)})

    example = re.search(r'for example ("architectures": \[".*?"\])', refusal(check, {})).group(1)
    path.write_text(json.dumps({**config, **json.loads("{" + example + "}")}))
    check()
    # Or it is loaded by the caller.
    check_architecture(runs.config(), {"model": AutoModelForCausalLM.from_pretrained(path.parent)})
