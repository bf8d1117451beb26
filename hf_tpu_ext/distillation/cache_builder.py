"""Runs a teacher over sequences, in static shapes, and writes what it says to a cache."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction, run_alone
from ..backends.processes import ALONE, Processes
from ..data import pad_rows
from ..layers.attention import static_masks
from ..layers.batch_length import BatchLength
from ..step.fingerprint import compile_alone
from .cache_format import CacheManifest, dataset_sequences, sequence_key
from .cache_writer import CacheWriter
from .teachers import run_to_head
from .top_k import TeacherRows, top_k_rows


@dataclass
class TeacherRun:
    """
    A teacher, and how it is run.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Frozen model on the backend's device, with TRL's fused head ([`~trl.trainer.utils.add_fused_lm_head`]).
        backend ([`Backend`]): The backend in use.
        collator (`Callable`):
            Makes a batch of rows with `input_ids` and `labels`, on XLA in one of the declared lengths.
        rows (`int`): Rows of a batch, over all chips.
        pad_token_id (`int`): Token id of the rows that complete a batch.
        compute_dtype (`torch.dtype`, *optional*): Dtype of the forward pass; by default that of the weights.
    """

    model: nn.Module
    backend: Backend
    collator: Callable[[list[dict[str, list[int]]]], dict[str, Any]]
    rows: int
    pad_token_id: int
    compute_dtype: torch.dtype | None = None

    def batch(self, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
        """
        Make a batch of at most `rows` sequences on the host: `input_ids` and `attention_mask`, `(batch, length)`.
        """
        batch = self.collator([{"input_ids": ids, "labels": ids} for ids in sequences])
        if self.backend.static_shapes:
            batch = pad_rows(batch, self.rows, self.pad_token_id)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def distributions(
        self, batch: dict[str, torch.Tensor], top_k: int, temperatures: tuple[float, ...]
    ) -> TeacherRows:
        """Run the teacher over a batch: [`TeacherRows`] of shape `(batch, length, ...)` on the host."""
        shape = batch["input_ids"].shape
        inputs = self.backend.send_rows(batch, shape[0])
        if self.backend.static_shapes:
            rows = self._compiled(inputs, run_alone, top_k=top_k, temperatures=temperatures)
        else:
            rows = self._compute(inputs, top_k, temperatures)
        return TeacherRows(*(tensor.reshape(*shape, -1) for tensor in self.backend.fetch(tuple(rows))))

    @cached_property
    def _compiled(self) -> CompiledFunction:
        return compile_alone(self.backend, self.model, self._compute)

    @torch.no_grad()
    def _compute(self, inputs: dict[str, torch.Tensor], top_k: int, temperatures: tuple[float, ...]) -> TeacherRows:
        with static_masks(), self.backend.autocast(self.compute_dtype):
            # Labels that are all counted and not shifted have the head see every position.
            head = run_to_head(self.model, {**inputs, "shift_labels": inputs["input_ids"]})
        return top_k_rows(head, top_k, temperatures, self.backend, self.compute_dtype)


def weights_hash(model: nn.Module) -> str:
    """Hash of a sample of a model's weights, which tells one training from another."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        sample = parameter.detach().flatten()[:64].float().numpy()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()


class Sequences:
    """
    The different sequences of prepared datasets (with `input_ids`), in the order of their first row. Without
    progress if `quiet`.
    """

    def __init__(self, datasets: Iterable[Dataset], quiet: bool = False):
        self._datasets = [dataset.select_columns(["input_ids"]) for dataset in datasets]
        self.lengths: list[int] = []
        self.largest_id = 0
        self._rows: dict[bytes, tuple[int, int]] = {}
        for number, dataset in enumerate(self._datasets):
            rows = enumerate(dataset_sequences(dataset))
            for row, input_ids in tqdm(
                rows, "reading sequences", len(dataset), leave=False, unit=" rows", disable=quiet
            ):
                if (key := sequence_key(input_ids)) not in self._rows:
                    self._rows[key] = (number, row)
                    self.lengths.append(len(input_ids))
                    self.largest_id = max(self.largest_id, int(input_ids.max()))
        self.keys = list(self._rows)
        self._places = list(self._rows.values())

    @property
    def hash(self) -> str:
        """Hash of all keys in their order."""
        return hashlib.blake2b(b"".join(self.keys), digest_size=16).hexdigest()

    def __getitem__(self, number: int) -> list[int]:
        dataset, row = self._places[number]
        return self._datasets[dataset][row]["input_ids"]


def build_cache(
    teacher: TeacherRun, sequences: Sequences, writer: CacheWriter, quiet: bool = False, processes: Processes = ALONE
) -> CacheManifest:
    """
    Run a teacher over all sequences that the cache does not have yet.

    Args:
        teacher ([`TeacherRun`]): The teacher.
        sequences ([`Sequences`]): The sequences.
        writer ([`CacheWriter`]): Writes the cache.
        quiet (`bool`, *optional*, defaults to `False`): Whether to show no progress.
        processes ([`Processes`], *optional*):
            The processes that share the work, each with a teacher of its own, as the `writer` has them. The first shows the
            progress of all. By default there is one.

    Returns:
        [`CacheManifest`]: What the complete cache holds.
    """
    settings = writer.settings
    pending = writer.pending
    num_left = sum(map(len, pending))
    teacher.model.eval()
    shapes = set()
    quiet = quiet or processes.index > 0
    progress = tqdm(total=settings.sequences, initial=settings.sequences - num_left, unit=" sequences", disable=quiet)
    # Rotary embeddings are those of the rows, which are shorter than the columns.
    with progress as bar, BatchLength([teacher.model], max(sequences.lengths)).override_rope():
        for first in range(0, len(pending), processes.count):
            # A file for each process. At the end some have none left.
            files = pending[first : first + processes.count]
            numbers = files[processes.index] if processes.index < len(files) else range(0)
            # Rows of about the same length share a batch. No batch reaches into another file, so a build that continues
            # sees the same batches.
            longest_first = sorted(numbers, key=lambda number: sequences.lengths[number], reverse=True)
            rows: dict[int, TeacherRows] = {}
            for start in range(0, len(longest_first), teacher.rows):
                of_batch = longest_first[start : start + teacher.rows]
                batch = teacher.batch([sequences[number] for number in of_batch])
                shape = batch["input_ids"].shape
                compiles = teacher.backend.static_shapes and shape not in shapes
                bar.set_description(
                    f"compiling {tuple(shape)}" if compiles else "running the teacher", refresh=compiles
                )
                shapes.add(shape)
                distributions = teacher.distributions(batch, settings.top_k, settings.temperatures)
                for row, number in enumerate(of_batch):
                    rows[number] = TeacherRows(*(tensor[row, : sequences.lengths[number]] for tensor in distributions))
                bar.update(len(of_batch))
            bar.set_description("writing", refresh=False)
            writer.write(numbers, [rows[number] for number in numbers])
            bar.update(sum(map(len, files)) - len(numbers))
    return writer.finish()
