"""What a chat template takes is trained on as by upstream's trainers. Where upstream raises, the row is named."""

import copy
import itertools

import pytest
from datasets import Dataset
from jinja2 import TemplateError
from refusals import refused
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_tpu_ext import TPUDPOTrainer, TPUGRPOTrainer, TPUKTOTrainer, TPURewardTrainer, TPUSFTTrainer
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny import CHAT_TEMPLATE


TEMPLATES = {
    # Joins strings, as many do.
    "joins": CHAT_TEMPLATE,
    "always raises": "{{ raise_exception('always') }}",
    "training": (
        "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "alternates": (
        "{% for message in messages %}"
        "{% if (message.role == 'user') == loop.index0 % 2 %}{{ raise_exception('must alternate') }}{% endif %}"
        "<{{ message.role }}>{{ message.content + '.' }}{% endfor %}"
    ),
    # Prints whatever it finds.
    "prints": "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ message.tool_calls }}{% endfor %}",
    # Knows calls of tools and parts, and refuses other roles.
    "refuses": (
        "{% for message in messages %}"
        "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('Unexpected role') }}{% endif %}"
        "<{{ message.role }}>"
        "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}"
        "{% elif message.content is string %}{{ message.content + '.' }}"
        "{% else %}{% for part in message.content %}{{ part.text + '.' }}{% endfor %}{% endif %}"
        "{% endfor %}"
    ),
}
USER, SAID = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}
CALL = [{"type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}]
PARTS = [{"type": "text", "text": "a question"}]
#: Conversations, and words of the message where upstream raises.
ODD = {
    "no content": ([USER, {**SAID, "content": None}], ["[1]", "has no content (None), expected a string"]),
    "text, not content": (
        [USER, {"role": "assistant", "content": None, "text": "Hello"}],
        ["[1] has no content (None) but 'text', expected a string"],
    ),
    "call of a tool": (
        [USER, {**SAID, "content": None, "tool_calls": CALL}],
        ["[1]", "has no content (None)"],
    ),
    "another role": (
        [{**USER, "role": "narrator"}, SAID],
        ["[0]", "has the role 'narrator', expected one of"],
    ),
    "no role": ([USER, {**SAID, "role": None}], ["[1]", "has no role, expected one of 'system', 'user'"]),
    "no messages": ([], ["is an empty list, expected a list of messages such as {'role': 'user'"]),
    "no message": ([USER, None], ["[1]", "is None, expected {'role': 'user'"]),
    "nothing": (None, ["is None"]),
}
#: Those of which all rows are odd, since a column has one type.
ALL_ODD = {
    "a number": (
        [{**USER, "content": 5}, {**SAID, "content": 7}],
        ["[0]", "has the content 5, expected a string"],
    ),
    "parts": (
        [{**USER, "content": PARTS}, {**SAID, "content": PARTS}],
        ["[0]", "has the content [{'type': 'te"],
    ),
    "not messages": (5, ["is 5, expected a string or a list of messages"]),
}
TRAINERS = {
    "sft": (TPUSFTTrainer, SFTTrainer, SFTConfig),
    "dpo": (TPUDPOTrainer, DPOTrainer, DPOConfig),
    "kto": (TPUKTOTrainer, KTOTrainer, KTOConfig),
    "reward": (TPURewardTrainer, RewardTrainer, RewardConfig),
    "grpo": (TPUGRPOTrainer, GRPOTrainer, GRPOConfig),
}


def row_of(kind, messages):
    """A row with a conversation, which may be odd, as a trainer takes it."""
    if kind == "sft":
        return {"messages": messages}
    if kind == "grpo":
        return {"prompt": messages}
    if kind == "kto":
        return {"prompt": messages, "completion": [SAID], "label": True}
    return {"prompt": messages, "chosen": [SAID], "rejected": [{**SAID, "content": "another"}]}


@pytest.fixture(scope="module")
def models(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    scored = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    return model, scored


def prepared(kind, ours, rows, template, models, tiny_model, directory, **settings):
    """The rows as a trainer prepares them."""
    ours_cls, stock_cls, config_cls = TRAINERS[kind]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATES[template]
    given = {"use_cpu": not ours, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8}
    args = config_cls(str(directory), **given, **settings)
    given = {"args": args, "train_dataset": rows, "processing_class": tokenizer}
    if kind == "grpo":
        given["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    trainer = (ours_cls if ours else stock_cls)(copy.deepcopy(models[kind == "reward"]), **given)
    if kind == "grpo":
        return trainer._tokenize_prompts(list(rows["prompt"]))[0]
    columns = [name for name in trainer.train_dataset.column_names if name.endswith("_ids")]
    return trainer.train_dataset.select_columns(columns).to_dict()


def check(kind, words, *given):
    try:
        expected = prepared(kind, False, *given)
    except Exception as error:
        refused([f"{type(error).__name__}: ", *words], lambda: prepared(kind, True, *given))
    else:
        assert prepared(kind, True, *given) == expected


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        *itertools.product(("sft", "grpo"), ("joins", "prints", "refuses")),
        ("dpo", "joins"),
        ("kto", "refuses"),
        ("reward", "joins"),
    ],
)
@pytest.mark.parametrize("odd", [*ODD, *ALL_ODD])
def test_conversations(xla, models, tiny_model, tmp_path, kind, odd, template):
    messages, words = (ODD | ALL_ODD)[odd]
    rows = [row_of(kind, messages)] * 2 if odd in ALL_ODD else [row_of(kind, [USER, SAID]), row_of(kind, messages)]
    given = (Dataset.from_list(rows), template, models, tiny_model, tmp_path)
    if odd == "nothing" and kind != "grpo":
        # Refused before a model is loaded.
        refused(["Row 1 of train_dataset", "None"], lambda: prepared(kind, True, *given))
    elif odd == "not messages" and kind == "sft":
        # Upstream drops the column, and no row is left.
        assert not any(prepared(kind, False, *given).values())
        refused(["No row of train_dataset is left"], lambda: prepared(kind, True, *given))
    else:
        rows = "Rows 0, 1" if odd in ALL_ODD else "Row 1"
        words = [
            f"{rows} of ",
            "(the first is row 0)",
            *words,
            "Correct this in the file",
            "leave such rows out with dataset.filter",
        ]
        check(kind, words, *given)


@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [
        ("sft", {"text": 5}, "text"),
        ("sft", {"prompt": "a", "completion": 5}, "completion"),
        ("dpo", {"prompt": 5, "chosen": "b", "rejected": "c"}, "prompt"),
        ("dpo", {"prompt": "a", "chosen": 5, "rejected": 6}, "chosen"),
        ("kto", {"prompt": "a", "completion": 5, "label": True}, "completion"),
        ("reward", {"chosen": 5, "rejected": 6}, "chosen"),
        ("grpo", {"prompt": 5}, "prompt"),
    ],
)
def test_numbers(xla, models, tiny_model, tmp_path, kind, row, column):
    words = ["Rows 0, 1 of", f"{column!r} is 5, expected a string"]
    check(kind, words, Dataset.from_list([row] * 2), "joins", models, tiny_model, tmp_path)


def test_the_row_is_one_that_upstream_raises_for(xla, models, tiny_model, tmp_path):
    """Rows as odd, which the template takes, are not named."""
    called, without = [USER, {**SAID, "content": None, "tool_calls": CALL}], [USER, {**SAID, "role": "narrator"}]
    rows = Dataset.from_list([row_of("sft", messages) for messages in ([USER, SAID], called, called, without)])
    check(
        "sft",
        ["Row 3 of the train dataset (the first is row 0): messages[1]"],
        rows,
        "refuses",
        models,
        tiny_model,
        tmp_path,
    )


def test_all_rows_are_named(xla, models, tiny_model, tmp_path):
    """It does not take one start for each mistake, and upstream prepares one row of each kind."""
    narrated = [[{**USER, "role": f"narrator of {part}"}, SAID] for part in range(30)]
    without = [[USER, {**SAID, "role": None}]] * 30
    conversations = [[USER, SAID], *without, [], [USER, SAID], *narrated]
    rows = Dataset.from_list([row_of("sft", messages) for messages in conversations])
    words = [
        "Rows 1, 2, 3 and 27 more of the train dataset (the first is row 0): messages[1] has no role",
        "Also row 31: 'messages' is an empty list",
        "; row 33: messages[0] has the role 'narrator of 0'",
        "; and 28 rows more. Row 1 begins",
    ]
    check("sft", words, rows, "refuses", models, tiny_model, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"), [("sft", "the train dataset"), ("dpo", "the train dataset"), ("grpo", "train_dataset")]
)
def test_rows_that_the_template_refuses(xla, models, tiny_model, tmp_path, kind, name):
    """All values are of the right kind."""
    conversations = [[USER, SAID, USER], [USER, USER], [USER, SAID, USER], [SAID]]
    rows = Dataset.from_list([row_of(kind, messages) for messages in conversations])
    words = [f"Rows 1, 3 of {name} (the first is row 0): refused by the", "TemplateError: must alternate"]
    refused(words, lambda: prepared(kind, True, rows, "alternates", models, tiny_model, tmp_path))


def test_a_conversation_without_an_answer(xla, models, tiny_model, tmp_path):
    """Which assistant_only_loss needs; without it upstream trains on the question."""
    rows = Dataset.from_list([row_of("sft", messages) for messages in ([USER, SAID], [USER])])
    assert len(prepared("sft", True, rows, "training", models, tiny_model, tmp_path)["input_ids"]) == 2
    words = [
        "Row 1 of the train dataset (",
        "): 'messages' has no message of the role 'assistant'",
        "assistant_only_loss",
    ]
    settings = {"assistant_only_loss": True}
    # Not the template, which upstream blames, is to be corrected.
    with pytest.raises(UserError, match="dataset.filter.$"):
        prepared("sft", True, rows, "training", models, tiny_model, tmp_path, **settings)
    refused(words, lambda: prepared("sft", True, rows, "training", models, tiny_model, tmp_path, **settings))


def test_an_error_that_is_of_no_row_is_upstreams(xla, models, tiny_model, tmp_path):
    rows = Dataset.from_list([row_of("sft", [USER, SAID])] * 2)
    with pytest.raises(TemplateError, match="always"):
        prepared("sft", True, rows, "always raises", models, tiny_model, tmp_path)
