"""Preference data that teaches nothing is refused by row and with the fix, and nothing is written."""

from dataclasses import replace

import pytest
from datasets import Dataset, IterableDataset
from preference import Case, rows_for, trainer_for
from refusals import refused
from trl import DPOConfig, DPOTrainer, SFTConfig
from trl.data_utils import maybe_extract_prompt, unpair_preference_dataset

from hf_tpu_ext import TPUDPOTrainer, TPUSFTTrainer


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
LABELLED = {"prompt": "a", "completion": "b", "label": True}
SAID = [{"role": "assistant", "content": "b"}]
NO_ANSWER = [{"role": "assistant", "content": "c"}]
ASKED = [{"role": "user", "content": "a"}]


def rows(row, **changed):
    """Four good rows, and then one with other values; a column with the value `None` in each is left out."""
    columns = {key: [value] * 4 + [changed.get(key, value)] for key, value in row.items()}
    return Dataset.from_dict(columns)


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("dpo", rows(PAIR).remove_columns("rejected"), ["train_dataset", "'rejected' is missing", "DPOTrainer needs"]),
        ("dpo", rows(PAIR).select_columns("prompt"), ["'chosen' and 'rejected' are missing", "Rename"]),
        ("dpo", rows(LABELLED), ["unpaired", "KTOTrainer", "trl kto", "one row"]),
        ("reward", rows(LABELLED), ["unpaired", "RewardTrainer needs pairs"]),
        ("dpo", rows(PAIR, rejected=None), ["Row 4 of train_dataset", "'rejected' is missing (None)", "filter"]),
        ("dpo", rows(PAIR, prompt=None), ["Row 4 of train_dataset", "'prompt' is missing (None)"]),
        ("dpo", rows(PAIR, chosen=""), ["Row 4 of train_dataset", "'chosen' is empty", "Correct this in the file"]),
        (
            "dpo",
            rows(PAIR, rejected="b"),
            ["Row 4 of train_dataset (the first is row 0):", "are the same", "row['chosen'] != row['rejected']"],
        ),
        ("reward", rows({**PAIR, "rejected": "b"}), ["Rows 0, 1, 2 and 2 more of train_dataset", "are the same"]),
        (
            "reward",
            Dataset.from_dict({"chosen": [SAID], "rejected": [[{"role": "assistant", "content": ""}]]}),
            ["Row 0", "'rejected' is empty"],
        ),
        ("kto", rows(LABELLED).remove_columns("label"), ["'label' is missing", "True for a completion", "give pairs"]),
        ("kto", rows(LABELLED).remove_columns("completion"), ["'completion' is missing", "Rename"]),
        ("kto", rows(LABELLED, label=None), ["Row 4 of train_dataset", "'label' is missing (None)"]),
        ("kto", rows(LABELLED, completion=""), ["Row 4 of train_dataset", "'completion' is empty"]),
        ("kto", rows({**PAIR, "rejected": "b"}), ["Rows 0, 1, 2 and 2 more of train_dataset", "are the same"]),
        ("dpo", rows(PAIR).select([]), ["train_dataset is empty"]),
        (
            "dpo",
            rows({"chosen": [{"from": "gpt", "value": "b"}], "rejected": [{"from": "gpt", "value": "c"}]}),
            ["'chosen' in train_dataset have the keys 'from' and 'value'", "dataset.map(trl.maybe_convert_to_chatml)"],
        ),
        (
            "dpo",
            rows({"chosen": SAID, "rejected": NO_ANSWER}),
            [
                "do not begin with one, which DPOTrainer needs",
                "Add a column 'prompt', or begin both with its messages.",
            ],
        ),
        (
            "kto",
            rows({"question": ASKED, "chosen": SAID, "rejected": NO_ANSWER}),
            ["train_dataset has no 'prompt'", "If 'question' holds it", "dataset.rename_column('question', 'prompt')"],
        ),
        (
            "dpo",
            rows({**PAIR, "prompt": ASKED}),
            [
                "'chosen' of train_dataset is text, and 'prompt' holds messages",
                '"chosen": [{"role": "assistant", "content": "..."}]',
            ],
        ),
    ],
)
def test_row(xla, tmp_path, kind, data, words):
    # Before a model is loaded: there is none of this name.
    case = Case(kind, by_name=True, reference=False)
    refused(words, lambda: trainer_for(case, tmp_path, ours=True, model="no/such-model", train_dataset=data))
    assert not (tmp_path / "run").exists()
    refused(
        [word.replace("train_dataset", "eval_dataset['b']") for word in words],
        lambda: trainer_for(
            case, tmp_path, ours=True, model="no/such-model", train_dataset=rows_for(kind), eval_dataset={"b": data}
        ),
    )


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("dpo", "text", ["their prompt leaves no room", "max_length=3", "train", "of 22", "Row 0 has 17 tokens"]),
        ("kto", "text", ["their prompt leaves no room", "max_length=3", "of 22", "Row 0 has 17 tokens"]),
        ("kto", "paired", ["their prompt leaves no room", "of 44"]),
        ("reward", "text", ["their text is longer", "max_length=3", "Set max_length above"]),
    ],
)
def test_no_row_has_a_completion_left(xla, tmp_path, kind, data, words):
    case = Case(kind, {"max_length": 3}, data=data)
    long = rows_for(kind, data).map(lambda row: {"prompt": row["prompt"] + "a" * 3})
    refused(words, lambda: trainer_for(case, tmp_path, ours=True, train_dataset=long))
    assert not (tmp_path / "run").exists()


def lost(trainer):
    return [line for line in trainer.adapted.changes if " dataset are " in line]


def test_rows_that_upstream_leaves_out_are_counted(xla, tmp_path):
    case = Case("dpo", {"max_length": 12})
    ours, stock = (trainer_for(case, tmp_path, ours=ours) for ours in (True, False))
    assert isinstance(ours, TPUDPOTrainer) and type(stock) is DPOTrainer
    left = len(stock.train_dataset)
    assert 0 < left < 22 and len(ours.train_dataset) == left
    assert f"{22 - left} of 22 rows of the train dataset are left out" in lost(ours)[0]
    keeps_end = trainer_for(
        replace(case, settings={**case.settings, "truncation_mode": "keep_end"}), tmp_path, ours=True
    )
    assert len(keeps_end.train_dataset) == 22
    (line,) = lost(keeps_end)
    assert "rows of the train dataset are longer than max_length=12 and lose their beginning" in line


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_rows_that_are_cut_are_counted(xla, tmp_path, kind):
    """Upstream's collators cut them, but for those of a reward model, which are left out."""
    trainer = trainer_for(Case(kind, {"max_length": 20}), tmp_path, ours=True)
    longer = [line for line in lost(trainer) if "are longer" in line]
    if kind == "reward":
        assert not longer and "their text is longer than max_length=" in lost(trainer)[0]
        return
    tokens = trainer.train_dataset
    columns = ["chosen_ids", "rejected_ids"] if kind == "dpo" else ["completion_ids"]
    whole = [[len(row["prompt_ids"]) + len(row[column]) for column in columns] for row in tokens]
    collated = trainer.data_collator([tokens[index] for index in range(len(tokens))])
    missing = sum(map(sum, whole)) - int(collated["attention_mask"].sum())
    cut = sum(max(row) > 20 for row in whole)
    assert 0 < cut < len(tokens) and missing > 0
    assert longer[0].startswith(f"{cut} of {len(tokens)} rows of the train dataset are longer than max_length=20")
    assert f"lose their end, {missing} of all {sum(map(sum, whole))} tokens" in longer[0]


NO_PROMPT = {"question": "a b", "chosen": "yes b", "rejected": "yes c"}


@pytest.mark.parametrize(
    "row, is_told",
    [
        (NO_PROMPT, True),
        ({**NO_PROMPT, "chosen": "a b yes", "rejected": "a b no"}, False),
        ({"source": "a", "chosen": ASKED + SAID, "rejected": ASKED + NO_ANSWER}, False),
        ({"score": 1, "chosen": "yes", "rejected": "no"}, False),
    ],
    ids=["text", "text that begins with it", "messages that begin with it", "no other text"],
)
@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_pairs_whose_prompt_is_in_another_column(xla, tmp_path, kind, row, is_told):
    trainer = trainer_for(Case(kind), tmp_path, ours=True, train_dataset=rows(row))
    said = [line for line in trainer.adapted.changes if "has no 'prompt'" in line]
    assert len(said) == is_told
    if is_told:
        # As the line says.
        fixed = rows(row).rename_column("question", "prompt")
        assert said[0].endswith("dataset.rename_column('question', 'prompt')")
        trainer = trainer_for(Case(kind), tmp_path, ours=True, train_dataset=fixed)
        assert not any("has no 'prompt'" in line for line in trainer.adapted.changes)


@pytest.mark.parametrize(
    ("shuffled", "settings"), [(False, {}), (True, {}), (False, {"loss_type": "apo_zero_unpaired"})]
)
def test_pairs_that_kto_takes_one_label_after_the_other(xla, tmp_path, shuffled, settings):
    data = rows_for("kto", "paired")
    if shuffled:
        data = unpair_preference_dataset(data.map(maybe_extract_prompt)).shuffle(seed=42)
    settings = {**settings, **({"train_sampling_strategy": "random"} if settings else {})}
    trainer = trainer_for(Case("kto", settings), tmp_path, ours=True, train_dataset=data)
    rows = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps
    told = f"the first {rows} rows of the train dataset, those of a step, all have label=True"
    assert any(told in line for line in trainer.adapted.changes) != (shuffled or bool(settings))


@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_a_file_without_a_column(xla, tmp_path, kind):
    """`datasets` makes the column of another file, and `None` of each row."""
    data = Dataset.from_dict({**PAIR, "prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": [None] * 2})
    words = ["No row of eval_dataset has a value of 'rejected'", "Rename or add the column in the file"]
    refused(words, lambda: trainer_for(Case(kind), tmp_path, ours=True, train_dataset=rows(PAIR), eval_dataset=data))


class OwnMetric(TPUDPOTrainer):
    """Logs a metric by a name that no class says."""

    def _compute_loss(self, model, inputs, return_outputs):
        result = super()._compute_loss(model, inputs, return_outputs)
        loss = result[0] if return_outputs else result
        self._metrics["train" if self.model.training else "eval"]["twice"].append(2 * loss.detach())
        return result


@pytest.mark.ci
def test_a_metric_of_the_users_own_is_logged_in_evaluations_too(xla, tmp_path):
    trainer = trainer_for(Case("dpo", {"step_replay": True}, evaluates=True), tmp_path, ours=True)
    own = OwnMetric(
        trainer.model,
        args=trainer.args,
        train_dataset=rows_for("dpo"),
        eval_dataset=rows_for("dpo", count=4),
        processing_class=trainer.processing_class,
    )
    own.train()
    logs = own.state.log_history
    assert {entry["step"] for entry in logs if "twice" in entry} and any("eval_twice" in entry for entry in logs)
    for entry in logs:
        for name in {"loss", "eval_loss"} & entry.keys():
            assert entry[name.replace("loss", "twice")] == pytest.approx(2 * entry[name], rel=1e-3)
    # Its sums are not known before the first step.
    assert "_more_metrics()" in own.steps.why_traced


@pytest.mark.parametrize("use_cpu", [True, False], ids=["cpu", "xla"])
@pytest.mark.parametrize(
    ("trainer_cls", "config_cls", "row"), [(TPUDPOTrainer, DPOConfig, PAIR), (TPUSFTTrainer, SFTConfig, {"text": "a"})]
)
def test_checks_read_the_first_row_of_a_stream_once(xla, tmp_path, trainer_cls, config_cls, row, use_cpu):
    read = []

    def stream():
        read.append(row)
        yield row

    args = config_cls(output_dir=str(tmp_path), use_cpu=use_cpu, max_steps=1, max_length=16)
    dataset = IterableDataset.from_generator(stream)
    refused(["model='./absent'"], lambda: trainer_cls(model="./absent", args=args, train_dataset=dataset))
    assert len(read) == 1
