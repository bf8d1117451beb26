"""Running every program of a run, on rows of every length that its batches are padded to, and compiling them so before the run."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ...backends import select_backend
from ...backends.base import Backend
from ...backends.compile_cache import CacheUse, cache_root
from ...backends.insight import Counters
from ...callbacks.run_lines import RunLines
from ...callbacks.samples import ShowSamples
from ...errors import UserError
from ...step.train_step import MICRO_STEP, OPTIMIZER_STEP
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


# ---- Warm-up ----


class WarmedUp(Exception):
    """
    Ends a warm-up, in place of a return into a script that would save what was not trained. `programs` is what was
    spent on each kind of step and shape of its batch.
    """

    def __init__(self, programs: dict[tuple[str, tuple[int, ...]], Counters], cache: CacheUse):
        super().__init__()
        self.programs = programs
        self.cache = cache


def open_compile_cache(args: ExtensionArguments) -> list[str]:
    """
    Open the compilation cache that a warm-up is to fill. Returns one line for each thing that a person should know.
    Nothing to compile, or nowhere to keep it, is a `ValueError`.
    """
    backend = select_backend(args.backend, args.num_chips, args.use_cpu)
    if not backend.static_shapes:
        raise UserError(
            f"There is nothing to warm up: nothing is compiled on {backend.name} ({backend.reason}). Run this command on "
            "the TPU machine."
        )
    lines = backend.use_compile_cache(args.compile_cache_dir)
    cache = backend.cache_use()
    if cache is None and lines:
        raise UserError(f"{lines[0]}.")
    if cache_root(args.compile_cache_dir)[0] is None:
        raise UserError(
            "There is no compilation cache: compile_cache_dir (or HF_TPU_EXT_COMPILE_CACHE) is off. Leave it out."
        )
    if cache is None:
        raise UserError(
            f"There is no compilation cache: this device ({backend.device_name}) cannot load stored executables, so none "
            "are stored. Run this command on the TPU machine. To store them anyway, to compare their keys, name a "
            "directory: --compile_cache_dir DIR"
        )
    if cache.problem is not None:
        raise UserError(f"{lines[0]}. Set compile_cache_dir to a directory that can be written.")
    return lines


class WarmUpMixin(EveryLengthMixin):
    """
    Makes `train` of a trainer compile the programs of training and evaluation, for every length that they need.

    They are compiled by running them: a few optimizer steps for each length, and one evaluation, over rows of the data
    that have that length. Nothing is saved, logged or reported, and the recipe's `output_dir` is not touched. `args`
    are changed. Nothing to compile, or nowhere to keep it, is a `ValueError`.
    """

    # A step may be run otherwise once it was seen, and otherwise again once the two were compared.
    steps_per_length = 3

    def __init__(self, *, args: ExtensionArguments, **kwargs):
        for line in open_compile_cache(args):
            tqdm.write(line)
        super().__init__(args=args, **kwargs)

    def train(self, *args, **kwargs) -> None:
        """Compile the programs instead of training, and raise [`WarmedUp`]. Rows without tokens are a `ValueError`."""
        num_programs = len(self.train_rows) * (2 if self.args.gradient_accumulation_steps > 1 else 1)
        if self.eval_dataset is not None:
            num_programs += len(self.eval_rows)
        quiet = self.args.disable_tqdm or not self.is_world_process_zero()
        with tqdm(total=num_programs, desc="compiling", unit="graph", disable=quiet) as bar:
            compiling = _Compiling(self.backend, lambda: self.batch_shape, self.pop_callback(ShowSamples), bar)
            self.train_every_length([compiling])
        raise WarmedUp(compiling.programs, self.backend.cache_use())


class _Compiling(TrainerCallback):
    """Notes what is spent on each program, and keeps the progress."""

    def __init__(
        self, backend: Backend, find_shape: Callable[[], tuple[int, ...]], samples: ShowSamples | None, bar: tqdm
    ):
        self.programs: dict[Hashable, Counters] = {}
        self._backend, self._find_shape = backend, find_shape
        self._samples = samples
        self._bar = bar
        self._before = backend.counters()

    def _note(self, kind: str, shape: tuple[int, ...] = ()) -> None:
        now = self._backend.counters()
        spent, self._before = now - self._before, now
        if (kind, shape) in self.programs:
            spent = self.programs[kind, shape] + spent
        elif shape:
            self._bar.update()
        self.programs[kind, shape] = spent

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._note("start of training")
        if self._samples is not None:
            self._samples.answer()
            self._note("samples")

    def on_substep_end(self, args, state, control, **kwargs):
        self._note(MICRO_STEP, self._find_shape())

    def on_step_end(self, args, state, control, **kwargs):
        self._note(OPTIMIZER_STEP, self._find_shape())

    def on_prediction_step(self, args, state, control, **kwargs):
        self._note("evaluation step", self._find_shape())

    def on_train_end(self, args, state, control, **kwargs):
        self._note("logs")
