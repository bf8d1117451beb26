"""Preference data that teaches nothing is refused by row, before a model is loaded."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import datasets

from ...errors import UserError
from .chat_template import check_chat_template
from .datasets import check_has_rows, check_messages
from .lost_rows import describe_answers, describe_cut, describe_left_out
from .messages import first_row, keys_of
from .rows import TEXT_OR_MESSAGES, naming_rows, refusal_of_rows, rows_of_other_kind


_PAIRS = "'chosen' and 'rejected' (and 'prompt', unless both begin with it)"


def check_preferences(dataset, name: str, trainer: str, compiles: bool = True) -> None:
    """
    Check that every row of a dataset says what is preferred. Of a stream, the first row is looked at; other types than those of
    `datasets` are left to upstream. Messages call it `name`, see [`named_datasets`]; `trainer` is `"DPOTrainer"`,
    `"RewardTrainer"` or `"KTOTrainer"`.

    Raises:
        `ValueError`: Columns are missing, some rows are text and others messages; or, where XLA `compiles` steps, a row has no
            completion, no label, or two completions that are the same.
    """
    if not (first := _check_columns(dataset, name, trainer)):
        return
    rows, problems = [first], {}
    if isinstance(dataset, datasets.Dataset):
        # Upstream ends no text with its token where the first row holds messages, and says nothing.
        rows, problems = _rows(dataset, [*first]), rows_of_other_kind(dataset, [*first])
    if compiles:
        problems |= {index: problem for index, row in enumerate(rows) if (problem := _problem(row))}
    if problems:
        raise refusal_of_rows(dataset, name, dict(sorted(problems.items())))


def _check_columns(dataset, name: str, trainer: str) -> dict[str, Any]:
    """
    Return the first row of the columns that say what is preferred, the prompt first where there is one; nothing of data that is
    tokenized already, or has images. The arguments, and what is raised where some are missing, are those of [`check_preferences`].
    """
    first = check_has_rows(dataset, name)
    names = first.keys()
    if not names or {"chosen_ids", "chosen_input_ids", "completion_ids", "image", "images"} & names:
        return {}
    if isinstance(dataset, datasets.Dataset):
        for column in sorted({"prompt", "chosen", "rejected", "completion", "label"} & names):
            if dataset.data.column(column).null_count == dataset.data.num_rows:
                raise UserError(
                    f"No row of {name} has a value of {column!r}, as of a file without that column. Rename or add the column in the file of "
                    f"{name}."
                )
    check_messages(first, name, ("prompt", "chosen", "rejected", "completion"))
    if {"chosen", "rejected"} <= names:
        if trainer != "RewardTrainer" and keys_of(first["chosen"]) and _lacks_prompt(first):
            others = _columns_beside_pairs(first)
            fix = (
                f"{_rename_to_prompt(others)}."
                if others
                else "Add a column 'prompt', or begin both with its messages."
            )
            raise UserError(
                f"{name} has no 'prompt', and the messages of 'chosen' and 'rejected' in its first row do not begin with one, which {trainer} "
                f"needs. {fix}"
            )
        return {column: first[column] for column in ("prompt", "chosen", "rejected") if column in names}
    has = f"{name} has the columns {[*first]}"
    if trainer == "KTOTrainer":
        columns_of_kto = ["prompt", "completion", "label"]
        if missing := [column for column in columns_of_kto if column not in names]:
            what = "'label' is True for a completion that is wanted and False for one that is not. "
            raise UserError(
                f"{has}, and KTOTrainer needs {', '.join(map(repr, columns_of_kto))}: {', '.join(map(repr, missing))} is missing. "
                f"{what if 'label' in missing else ''}Rename a column, or give pairs: {_PAIRS}."
            )
        return {column: first[column] for column in columns_of_kto}
    if {"completion", "label"} <= names:
        raise UserError(
            f"{has}, which is unpaired preference data, and {trainer} needs pairs: {_PAIRS}. Train on it with KTOTrainer "
            "(trl kto), or put a wanted and an unwanted completion of the same prompt into one row."
        )
    missing = [column for column in ("chosen", "rejected") if column not in names]
    are_missing = " and ".join(map(repr, missing)) + (" is" if len(missing) == 1 else " are")
    raise UserError(f"{has}, and {trainer} needs {_PAIRS}: {are_missing} missing. Rename a column, or add it.")


def _rows(dataset: datasets.Dataset, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in dataset.with_format(None).select_columns(columns).iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _problem(row: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a row, and what is true of those of which it is not; `None` if nothing is."""
    for column, value in row.items():
        if value is None:
            return f"{column!r} is missing (None)", f"row[{column!r}] is not None"
    for column in row:
        if column not in ("prompt", "label") and _is_empty(row[column]):
            content = f"row[{column!r}]" + "[-1]['content']" * (bool(row[column]) and not isinstance(row[column], str))
            return f"{column!r} is empty", content
    if "chosen" in row and row["chosen"] == row["rejected"]:
        return "'chosen' and 'rejected' are the same, so nothing is preferred", "row['chosen'] != row['rejected']"
    return None


def _is_empty(completion: Any) -> bool:
    if isinstance(completion, str | list) and not completion:
        return True
    # What is neither text nor messages is left to upstream.
    last = completion[-1] if isinstance(completion, list) else None
    # What is wanted of an assistant may be a call of a tool.
    return isinstance(last, dict) and not (last.get("content") or last.get("tool_calls"))


class PreferenceData:
    """The part of the preference trainers that looks at data which is prepared: upstream leaves rows out that are too long."""

    def _check_data(self, arguments: Mapping[str, Any]) -> None:
        """[`~hf_tpu_ext.trainers.checks.upstream.check_trainer`] does so, with the columns of preferences."""

    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        check_chat_template(dataset, f"{dataset_name} dataset", TEXT_OR_MESSAGES, processing_class, args)
        prepare = super()._prepare_dataset
        alone = partial(prepare, processing_class=processing_class, args=args, dataset_name=dataset_name)
        with naming_rows({f"the {dataset_name} dataset": dataset}, TEXT_OR_MESSAGES, alone):
            prepared_dataset = prepare(dataset, processing_class, args, dataset_name)
        if isinstance(dataset, datasets.Dataset) and isinstance(prepared_dataset, datasets.Dataset):
            lines = _describe_left_out_pairs(dataset, prepared_dataset, dataset_name, args, prepare, processing_class)
            of_answers = describe_answers(dataset, dataset_name, ("chosen", "rejected", "completion"))
            of_answers += _describe_missing_prompt(dataset, dataset_name)
            self.tell_of_rows(of_answers + lines + describe_cut(prepared_dataset, dataset_name, args))
            if dataset_name == "train" and "label" in prepared_dataset.column_names:
                self.adapted.changes += _why_labels_are_apart(prepared_dataset, args)
        return prepared_dataset


def _describe_missing_prompt(dataset: datasets.Dataset, name: str) -> list[str]:
    """A line for pairs without a prompt beside a column that may hold one, by the first row: upstream trains on the answers alone."""
    first = first_row(dataset) or {}
    if not _lacks_prompt(first) or not (others := _columns_beside_pairs(first)):
        return []
    return [
        f"the {name} dataset has no 'prompt', and 'chosen' and 'rejected' of its first row do not begin with one: the answers are trained on "
        f"without it. {_rename_to_prompt(others)}"
    ]


def _lacks_prompt(first: Mapping[str, Any]) -> bool:
    """Whether a row of pairs has no prompt: upstream takes what both answers begin with, where there is no such column."""
    if "prompt" in first or not {"chosen", "rejected"} <= first.keys():
        return False
    chosen, rejected = first["chosen"], first["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        # Two answers may begin with the same word.
        return len(os.path.commonprefix([chosen, rejected]).split()) < 2
    return bool(keys_of(chosen) and keys_of(rejected)) and chosen[0] != rejected[0]


def _columns_beside_pairs(first: Mapping[str, Any]) -> list[str]:
    """The columns of a row, besides those of a pair, with text or messages."""
    return [
        column
        for column, value in first.items()
        if column not in ("chosen", "rejected") and (isinstance(value, str) or keys_of(value))
    ]


def _rename_to_prompt(columns: list[str]) -> str:
    either = "one of " * (len(columns) > 1) + ", ".join(map(repr, columns))
    return (
        f"If {either} holds it, rename that column to 'prompt' in the file, or, in Python, with "
        f"dataset.rename_column({columns[0]!r}, 'prompt')"
    )


def _why_labels_are_apart(dataset: datasets.Dataset, args) -> list[str]:
    """A line for rows in the order of their labels, as upstream makes them of pairs: all that are chosen, then all that are rejected."""
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    labels = dataset["label"]
    if args.train_sampling_strategy == "sequential" and len(set(labels[:rows])) == 1 and len(set(labels)) == 2:
        return [
            f"the first {min(rows, len(labels))} rows of the train dataset, those of a step, all have label={labels[0]}, and KTO takes rows "
            "in their order: a step learns from one label alone. Give shuffled rows, of pairs (with trl.data_utils) "
            "unpair_preference_dataset(dataset.map(maybe_extract_prompt)).shuffle(seed=42); or set loss_type='apo_zero_unpaired' and "
            "train_sampling_strategy='random'."
        ]
    return []


def _describe_left_out_pairs(
    dataset, prepared_dataset, name: str, args, prepare: Callable, processing_class
) -> list[str]:
    """A line on the rows that are left out, if there are some. Where no row is left, it is an error."""
    rows = len(dataset)
    if "label" in prepared_dataset.column_names and "label" not in dataset.column_names:
        # Each completion of a pair is a row of its own.
        rows *= 2
    what = (
        "their prompt leaves no room for a completion within"
        if "prompt_ids" in prepared_dataset.column_names
        else "their text is longer than"
    )
    why = f"{what} max_length={args.max_length}"
    if len(prepared_dataset):
        return describe_left_out(rows, len(prepared_dataset), name, f"{why}. A higher max_length keeps them")
    without_limit = copy.copy(args)
    without_limit.max_length = None
    row = prepare(dataset.select([0]), processing_class, without_limit, f"first row of the {name}")[0]
    tokens = len(row["prompt_ids"]) if "prompt_ids" in row else max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    raise UserError(
        f"No row of the {name} dataset is left of {rows}: {why}. Row 0 has {tokens} tokens there. Set max_length above "
        f"the longest, for example max_length={2 * tokens}."
    )
