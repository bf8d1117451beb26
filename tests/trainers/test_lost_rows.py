"""Rows that `max_length` cuts or leaves out are told of, and prepared as by upstream's trainer, from the same files of its cache."""

import json

import pytest
from datasets import Dataset, concatenate_datasets, load_dataset
from trl import SFTTrainer

from hf_tpu_ext.errors import UserError
from hf_tpu_ext.trainers.checks.lost_rows import describe_answers, describe_cut


MAX_LENGTH = 24


def lines_of(trainer):
    return [line for line in trainer.adapted.changes if " dataset are " in line]


def tokens_of(runs, dataset, **config):
    """The tokens of each row as upstream makes them without a `max_length`."""
    config = runs.config(use_cpu=True, max_length=None, **config)
    return runs.trainer(SFTTrainer, config, train_dataset=dataset).train_dataset["input_ids"]


def cut_of(runs, dataset, name, end="end", keeps="A higher max_length", **config):
    """The line on the rows that are cut."""
    lengths = [len(row) for row in tokens_of(runs, dataset, **config)]
    lost = sum(max(0, length - MAX_LENGTH) for length in lengths)
    rows = sum(length > MAX_LENGTH for length in lengths)
    assert 0 < rows < len(lengths)
    return (
        f"{rows} of {len(lengths)} rows of the {name} dataset are longer than max_length={MAX_LENGTH} and lose their {end}, {lost} of "
        f"all {sum(lengths)} tokens ({lost / sum(lengths):.0%}): the longest has {max(lengths)}. {keeps} keeps them, up "
        "to the model's positions"
    )


@pytest.fixture
def texts(runs):
    """Rows of text, of which nothing is left out."""
    return runs.train_dataset.map(
        lambda row: {"text": row["prompt"] + row["completion"]}, remove_columns=["prompt", "completion"]
    )


@pytest.mark.parametrize("use_cpu", [True, False])
def test_rows_that_are_cut(runs, texts, use_cpu):
    data = {"train_dataset": texts, "eval_dataset": {"few": texts.select(range(9))}}
    trainer = runs.ours(train=False, max_length=MAX_LENGTH, use_cpu=use_cpu, kwargs=data)
    assert lines_of(trainer) == [
        cut_of(runs, texts, "train"),
        cut_of(runs, data["eval_dataset"]["few"], "few"),
    ]
    # As much as is missing.
    left = sum(map(len, trainer.train_dataset["input_ids"]))
    whole = sum(map(len, tokens_of(runs, texts)))
    assert f"{whole - left} of all {whole} tokens" in lines_of(trainer)[0]


def test_rows_that_are_left_out(runs):
    """The prompt alone is as long as may be: upstream drops the row."""
    trainer = runs.ours(train=False, max_length=10)
    rows, left = len(runs.train_dataset), len(trainer.train_dataset)
    longer, left_out, *of_evaluation = lines_of(trainer)
    assert 0 < left < rows and f" of {rows} rows of the train dataset are longer than max_length=10" in longer
    why = "none of their tokens within max_length=10 has a label"
    assert left_out == f"{rows - left} of {rows} rows of the train dataset are left out: {why}"
    assert of_evaluation[1] == f"{10 - len(trainer.eval_dataset)} of 10 rows of the eval dataset are left out: {why}"


ASKED, SAID, BLANK = (
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "b"},
    {"role": "assistant", "content": " \n"},
)
CALLS = {**BLANK, "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}]}


@pytest.mark.parametrize(
    ("rows", "blank"),
    [
        ({"messages": [[ASKED, SAID], [ASKED, BLANK, ASKED, SAID], [ASKED, CALLS], [ASKED, BLANK]]}, "rows 1, 3"),
        (
            {
                "conversations": [
                    [{"from": "user", "value": ""}, {"from": "gpt", "value": value}] for value in ("b", "")
                ]
            },
            "row 1",
        ),
        ({"prompt": ["a"] * 6, "completion": ["b", "", "", "c", " ", ""]}, "rows 1, 2, 4 and 1 more"),
        ({"prompt": [[ASKED, BLANK, ASKED]] * 2, "completion": [[SAID], [BLANK]]}, "row 1"),
        ({"text": ["a", ""]}, None),
    ],
    ids=["messages", "conversations", "text", "completions", "no answers"],
)
def test_empty_answers(runs, rows, blank):
    """Upstream trains on them."""
    dataset = Dataset.from_dict(rows)
    # As a selection, behind a row that it leaves out.
    dataset = concatenate_datasets([dataset.select([len(dataset) - 1]), dataset]).select(range(1, len(dataset) + 1))
    data = {"train_dataset": dataset, "eval_dataset": {"few": dataset.select([0, 0])}}
    trainer = runs.ours(train=False, max_length=64, kwargs=data)
    lines = [line for line in trainer.adapted.changes if "an empty answer" in line]
    assert len(trainer.train_dataset) == len(dataset) and len(lines) == (blank is not None)
    if blank is not None:
        assert (
            f" of {len(dataset)} rows of the train dataset have an empty answer ({blank}; the first is row 0), from which a model learns"
            in lines[0]
        )


def test_a_negative_length_leaves_out_the_end_of_each_row(runs):
    """As upstream's slices take it, which XLA refuses."""
    tokens = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]})
    (line,) = describe_cut(tokens, "train", runs.config(max_length=-2))
    assert line.startswith("max_length=-2 takes the last 2 tokens from each of the 2 rows of the train dataset.")


MIXED = {**BLANK, "tags": ["a", 1]}
PARTS = [{"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "rows",
    [
        [[ASKED, SAID], [ASKED, MIXED]],
        [[ASKED, {**CALLS, "tags": ["a", 1]}], [ASKED, BLANK]],
        [[ASKED, SAID], json.dumps([ASKED, BLANK])],
        [[ASKED, {**SAID, "content": PARTS}], [ASKED, BLANK]],
    ],
    ids=["tags", "calls", "a row as JSON", "parts"],
)
def test_empty_answers_in_json(rows):
    """`datasets` keeps messages so whose keys or types differ."""
    dataset = Dataset.from_list([{"messages": row} for row in rows], on_mixed_types="use_json")
    assert "arrow.json" in str(dataset.data.column("messages").type)
    (line,) = describe_answers(dataset, "train", ["messages"])
    assert line.startswith("1 of 2 rows of the train dataset have an empty answer (row 1; the first is row 0), from")
    mistaken = [[ASKED], [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b", "tags": ["a", 1]}]]
    dataset = Dataset.from_list([{"conversations": row} for row in mistaken], on_mixed_types="use_json")
    of_role, of_question = describe_answers(dataset, "train", ["conversations"])
    assert "have answers of another role than 'assistant', such as 'gpt' (row 1;" in of_role
    assert "end with a message that is not the assistant's (row 0;" in of_question


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_a_split_are_quoted(runs, shuffle):
    """Their numbers are not those of the file, which are given for the first."""
    rows = Dataset.from_dict({"prompt": [f"p{row}" for row in range(20)], "completion": ["b", ""] * 10})
    split = rows.train_test_split(0.5, seed=1, shuffle=shuffle)
    trainer = runs.ours(
        train=False, max_length=64, kwargs={"train_dataset": split["train"], "eval_dataset": split["test"]}
    )
    of_train, of_evaluation = [line for line in trainer.adapted.changes if "an empty answer" in line]
    for line, name, why in (
        (of_train, "train", "from which a model learns to answer nothing"),
        (of_evaluation, "test", "which the loss of an evaluation takes for the right one"),
    ):
        first = split[name]["completion"][:].index("")
        was = (
            f" was row {split[name]['prompt'][first][1:]} before the dataset was split, shuffled or selected from, and"
        )
        quote = f"Row {first}{was * shuffle} begins {split[name][first]}. Correct this in the file"
        assert f"; the first is row 0), {why}. {quote}" in line
    mistyped = Dataset.from_list([{"messages": [{**SAID, "role": role}]} for role in ("assistant", "asistant")])
    with pytest.raises(
        UserError,
        match=r"Row 0 of train_dataset \(the first is row 0\): .* Row 0 was row 1 before the dataset was split",
    ):
        runs.ours(train=False, kwargs={"train_dataset": mistyped.select([1, 0])})


NAMED = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
OF_GPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"conversations": [OF_GPT, OF_GPT]}, "2 of 3 rows of the train dataset have answers of another role"),
        ({"messages": [[ASKED, SAID], [ASKED, SAID, ASKED]]}, "1 of 3 rows of the train dataset end with a message"),
        ({"prompt": [[ASKED]] * 2, "completion": [[SAID], [ASKED]]}, "1 of 3 rows of the train dataset end with a"),
    ],
    ids=["roles", "a question", "a completion"],
)
def test_answers_that_are_none(runs, rows, words):
    """Upstream trains on them."""
    dataset = Dataset.from_dict(rows)
    good = dataset.select([0]) if "conversations" not in rows else Dataset.from_dict({"conversations": [NAMED]})
    trainer = runs.ours(
        train=False,
        max_length=64,
        kwargs={"train_dataset": concatenate_datasets([good, dataset]), "eval_dataset": None},
    )
    (line,) = [line for line in trainer.adapted.changes if "rows of" in line]
    assert line.startswith(words) and ("rows 1, 2" if "conversations" in rows else "row 2") in line
    trainer = runs.ours(train=False, max_length=64, kwargs={"train_dataset": good, "eval_dataset": None})
    assert not any("rows of" in line for line in trainer.adapted.changes)


def test_columns_that_are_not_trained_on_are_not_looked_at(runs):
    rows = {"prompt": ["a"] * 3, "completion": ["b"] * 3, "messages": [[ASKED, BLANK]] * 3, "chosen": [[ASKED]] * 3}
    trainer = runs.ours(
        train=False, max_length=64, kwargs={"train_dataset": Dataset.from_dict(rows), "eval_dataset": None}
    )
    assert not any("rows of" in line for line in trainer.adapted.changes)


def test_rows_without_a_label_are_left_out(runs):
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 3, "labels": [[5, 6, 7], [-100] * 3, [5, 6, 7]]})
    trainer = runs.ours(train=False, max_length=3, kwargs={"train_dataset": rows, "eval_dataset": None})
    assert lines_of(trainer) == ["1 of 3 rows of the train dataset are left out: none of their tokens has a label"]


@pytest.mark.parametrize("config", [{}, {"packing": True}, {"max_length": None, "use_cpu": True}])
def test_rows_that_lose_nothing(runs, config):
    assert lines_of(runs.ours(train=False, **{"max_length": 48, **config})) == []


def test_rows_of_a_stream_are_not_counted(runs, texts):
    data = {"train_dataset": texts.to_iterable_dataset(), "eval_dataset": None}
    assert lines_of(runs.ours(train=False, max_length=MAX_LENGTH, kwargs=data)) == []


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_cuts_by_one_strategy_alone(runs, texts, strategy):
    data, packing = {"train_dataset": texts, "eval_dataset": None}, {"packing": True, "packing_strategy": strategy}
    trainer = runs.ours(train=False, max_length=MAX_LENGTH, kwargs=data, **packing)
    packed, whole = (sum(map(len, rows)) for rows in (trainer.train_dataset["input_ids"], tokens_of(runs, texts)))
    assert (packed < whole) == (strategy == "bfd")
    keeps = "A higher max_length or packing_strategy='bfd_split'"
    assert lines_of(trainer) == ([cut_of(runs, texts, "train", keeps=keeps)] if strategy == "bfd" else [])


def test_what_is_said_when(runs, texts, capsys, caplog):
    """At the start of a run and in its record; of rows that an evaluation is given, at once."""
    data = {"train_dataset": texts, "eval_dataset": None}
    trainer = runs.ours(train=False, max_length=MAX_LENGTH, max_steps=1, use_cpu=True, kwargs=data)
    assert "rows of the train dataset" not in capsys.readouterr().out
    trainer.train()
    (line,) = lines_of(trainer)
    assert f"  {line}\n" in capsys.readouterr().out
    assert line in trainer.describe_run(trainer.args, None)["facts"]["changes"]
    trainer.evaluate(texts.select(range(9)))
    assert cut_of(runs, texts.select(range(9)), "eval") in caplog.text
    assert lines_of(trainer) == [line]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"truncation_mode": "keep_end"},
        {"packing": True},
        {"shuffle_dataset": True},
        {"packing": True, "packing_strategy": "wrapped", "shuffle_dataset": True},
        {"completion_only_loss": False},
    ],
)
def test_rows_are_upstreams_from_the_same_cache(runs, tmp_path, config):
    """Nothing is prepared anew that upstream's trainer or an earlier run has prepared, and the lines are the same."""
    runs.train_dataset.to_json(tmp_path / "rows.jsonl")

    def prepare(cls, **more):
        rows = load_dataset(
            "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
        )
        kwargs = {"train_dataset": rows, "eval_dataset": None}
        trainer = runs.trainer(cls, runs.config(max_length=10, **config, **more), **kwargs)
        files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.arrow")}
        return trainer, files

    from hf_tpu_ext import TPUSFTTrainer

    stock, files = prepare(SFTTrainer, use_cpu=True)
    (first, of_first), (second, of_second) = (prepare(TPUSFTTrainer) for _ in range(2))
    assert len(files) > 3 and files == of_first == of_second
    assert first.train_dataset[:] == second.train_dataset[:] == stock.train_dataset[:]
    end = "beginning" if config.get("truncation_mode") else "end"
    expected = [f" of 22 rows of the train dataset are longer than max_length=10 and lose their {end}"]
    if config.get("packing_strategy") == "wrapped":
        expected = []
    elif "packing" not in config and (left := len(stock.train_dataset)) < 22:
        expected.append(f"{22 - left} of 22 rows of the train dataset are left out")
    assert lines_of(first) == lines_of(second) and len(lines_of(first)) == len(expected)
    assert all(words in line for words, line in zip(expected, lines_of(first), strict=True))
