"""Running every program of a run, on rows of every length that its batches are padded to."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ...callbacks.run_lines import RunLines
from ..checks.datasets import has_images
from ..configs import ExtensionArguments


class EveryLengthMixin:
    """
    Makes `train` of a trainer run a few optimizer steps for each length that batches are padded to, and one
    evaluation.

    Nothing is saved, logged or reported, and the recipe's `output_dir` is not touched. `args` are changed.
    """

    #: In place of the recipe's.
    output_dir: str
    #: Optimizer steps for each length.
    steps_per_length: int
    # There is nothing to save.
    stops_when_told = False

    def __init__(self, *, args: ExtensionArguments, **kwargs):
        args.output_dir = self.output_dir
        args.report_to = []
        args.step_status = args.run_report = False
        args.save_strategy = SaveStrategy.NO
        args.load_best_model_at_end = args.push_to_hub = False
        super().__init__(args=args, **kwargs)

    @classmethod
    def over(cls, trainer: type, output_dir: str) -> type:
        """Make the class that does this for a trainer class, with a directory for what a trainer needs one for."""
        name = f"{cls.__name__.removesuffix('Mixin')}{trainer.__name__}"
        return type(name, (cls, trainer), {"output_dir": output_dir})

    def train_every_length(self, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """
        Train on made batches of every length, and evaluate at the end, with `callbacks` in place of those that say how
        a run is getting on.
        """
        assert self.lengths, "the commands that take a recipe ask for max_length"
        rows, steps = self.rows_of_a_step()
        times = -(-self.steps_per_length // steps)
        # Each process takes its own, of the same length.
        processes = self.args.world_size
        self.train_dataset = _repeat(self.train_rows, rows * processes, times)
        if self.eval_dataset is not None:
            self.eval_dataset = _repeat(self.eval_rows, self.args.eval_batch_size * processes)
        self.args.train_sampling_strategy = "sequential"
        if self.generates:
            self.shuffle_dataset = False
        self.args.max_steps = len(self.train_rows) * steps * times
        for callback in (ProgressCallback, PrinterCallback, RunLines):
            self.remove_callback(callback)
        for callback in (_EvaluateAtTheEnd(self.eval_dataset is not None), *callbacks):
            self.add_callback(callback)
        super().train()

    @cached_property
    def train_rows(self) -> datasets.Dataset:
        """One row of the training data for each length that its batches are padded to."""
        return self._row_per_length(self.train_dataset)

    @cached_property
    def eval_rows(self) -> datasets.Dataset:
        """One row of the evaluation data for each length that its batches are padded to."""
        return self._row_per_length(self.eval_dataset)

    def _rows_for_reference(self, dataset: datasets.Dataset, name: str, rows: int) -> tuple[datasets.Dataset, Path]:
        # Each batch has one length.
        return _repeat(self._row_per_length(dataset), rows), Path(self.output_dir) / f"reference-{name}"

    def _row_per_length(self, dataset) -> datasets.Dataset:
        lengths = self.lengths_of_rows(dataset)
        if lengths is not None:
            rows: dict[int, int] = {}
            for index, length in enumerate(lengths):
                rows.setdefault(bisect_left(self.lengths, min(length, self.lengths[-1])), index)
            return dataset.select([rows[place] for place in sorted(rows)])
        if has_images(dataset):
            return self.synthetic_rows(dataset)
        row = next(iter(dataset))
        return datasets.Dataset.from_list([_stretch(row, length) for length in self.lengths])


class _EvaluateAtTheEnd(TrainerCallback):
    def __init__(self, has_data: bool):
        self._has_data = has_data

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = False
        if state.global_step == state.max_steps:
            control.should_log = True
            control.should_evaluate = self._has_data


def _repeat(rows: datasets.Dataset, count: int, times: int = 1) -> datasets.Dataset:
    """Each row `count` times one after the other, and that `times` times."""
    return rows.select(torch.arange(len(rows)).repeat_interleave(count).repeat(times).tolist())


def _stretch(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row of another length: what there is for each token is repeated, or cut off."""
    if "input_ids" in row:
        tokens, longer_row = len(row["input_ids"]), dict(row)
        sizes = {key: length for key, value in row.items() if isinstance(value, list) and len(value) == tokens}
    else:
        # Sequences of an example, behind its prompt if it has one by itself.
        longer_row = {**row, "prompt_ids": row["prompt_ids"][: length // 2]} if "prompt_ids" in row else dict(row)
        sizes = {key: length - len(longer_row.get("prompt_ids", ())) for key in row if key.endswith("_ids")}
        sizes.pop("prompt_ids", None)
    for key, size in sizes.items():
        longer_row[key] = (row[key] * -(-size // len(row[key])))[:size]
    if "seq_lengths" in row:
        longer_row["seq_lengths"] = [length]
    return longer_row
