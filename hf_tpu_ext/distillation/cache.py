"""Reads a teacher's distributions from disk, and brings them through a batch to the loss."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .cache_format import (
    MAKE,
    chat_template_hash,
    dataset_sequences,
    find_damage,
    read_manifest,
    read_sequence,
    sequence_key,
    temperatures_with_normaliser,
    tokenizer_hash,
)
from .losses import TopK


# What a batch holds of a teacher's answers, each of shape `(batch, length, ...)`.
_KEYS = ("teacher_ids", "teacher_log_probs", "teacher_log_tail")


class TeacherCache:
    """
    Reads a cache that `hf-tpu cache-teacher` made, once the checksums of all files have been compared.

    Args:
        directory (`str` or `Path`): Directory of the cache.
        preload (`bool`, *optional*, defaults to `False`):
            Whether to read all of it into memory. By default files are mapped, and read where a sequence is looked up.

    Raises:
        `ValueError`: There is no complete cache, or a file of it is missing or was changed.
    """

    def __init__(self, directory: str | Path, preload: bool = False):
        self.directory = Path(directory)
        manifest = read_manifest(self.directory)
        if manifest is None:
            raise UserError(
                f"kd_cache={str(self.directory)!r} holds no teacher's cache. Build it: {MAKE} {self.directory}."
            )
        if not manifest.is_complete:
            raise UserError(
                f"The teacher's cache {self.directory} is not complete: {manifest.sequences_written} of {manifest.sequences} sequences "
                f"are there. Finish it with the command that started it: {MAKE} {self.directory}."
            )
        self.manifest, shards = manifest, manifest.shards
        for shard in tqdm(shards, "checking the teacher's cache", disable=len(shards) < 8, leave=False):
            if (problem := find_damage(self.directory, shard, verify=True)) is not None:
                raise UserError(
                    f"{self.directory / shard.file} {problem}. Rebuild it with the command that built the cache: "
                    f"{MAKE} {self.directory} (complete files are kept)."
                )
        self._contents = [(self.directory / shard.file).read_bytes() for shard in shards] if preload else None
        self._open: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self._places: dict[bytes, tuple[int, int]] = {}
        for number in range(len(shards)):
            keys = self._reader(number).schema.metadata[b"keys"]
            for place, start in enumerate(range(0, len(keys), 16)):
                self._places[keys[start : start + 16]] = (number, place)

    def __getstate__(self) -> dict[str, Any]:
        # Workers of a dataloader open the files themselves.
        return {**vars(self), "_open": {}}

    def _reader(self, shard: int) -> pa.ipc.RecordBatchFileReader:
        if shard not in self._open:
            path = self.directory / self.manifest.shards[shard].file
            source = pa.memory_map(str(path)) if self._contents is None else pa.py_buffer(self._contents[shard])
            # A forked worker has none of the threads of its parent.
            self._open[shard] = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(use_threads=False))
        return self._open[shard]

    def __contains__(self, input_ids: list[int] | np.ndarray) -> bool:
        return sequence_key(input_ids) in self._places

    def lookup(self, input_ids: list[int], temperature: float, top_k: int) -> TopK:
        """
        Look a sequence up.

        Args:
            input_ids (`list[int]`): Token ids without padding.
            temperature (`float`): One of the manifest's temperatures.
            top_k (`int`): Entries of a position, at most the manifest's.

        Returns:
            [`TopK`]: Ids of shape `(length, top_k)` in int32, most likely first, their log-probabilities at the
            temperature in float32, and the logarithm of the mass of all others, of shape `(length,)`.

        Raises:
            `ValueError`: The sequence is not in the cache.
        """
        place = self._places.get(sequence_key(input_ids))
        if place is None:
            raise UserError(
                f"A sequence of {len(input_ids)} tokens that begins with {list(input_ids[:8])} is not in the teacher's cache "
                f"{self.directory}. It was built from other data: {self._remake}"
            )
        manifest = self.manifest
        shard, number = place
        arrays = read_sequence(self._reader(shard), number)
        ids, log_probs = torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["values"]).float() / temperature
        if temperature != 1:
            column = temperatures_with_normaliser(manifest.temperatures).index(temperature)
            log_probs = log_probs - torch.from_numpy(arrays["normalisers"][:, column, None])
        log_tail = torch.from_numpy(arrays["log_tails"][:, manifest.temperatures.index(temperature)]).float()
        if top_k < manifest.top_k:
            log_tail = torch.cat([log_tail[:, None], log_probs[:, top_k:]], dim=-1).logsumexp(-1)
        return TopK(ids[:, :top_k], log_probs[:, :top_k], log_tail)

    @property
    def _remake(self) -> str:
        return f"build another cache from this recipe: {MAKE} DIR --kd_teacher {self.manifest.teacher}"

    def check_dataset(self, dataset: Dataset, name: str) -> None:
        """Raise a `ValueError` if rows of a prepared dataset, called `name` in it, are not in the cache."""
        absent = [row for row, input_ids in enumerate(dataset_sequences(dataset)) if input_ids not in self]
        if absent:
            fix = f"It was built from other data: {self._remake}"
            if name.startswith("eval_dataset"):
                fix = (
                    "It was built from other data, or by a recipe without eval_strategy. Build it with evaluation rows: "
                    f"{MAKE} {self.directory} --kd_teacher {self.manifest.teacher} --eval_strategy steps --overwrite"
                )
            raise UserError(
                f"{len(absent)} of {len(dataset)} sequences of {name} are not in the teacher's cache {self.directory}, "
                f"first row {absent[0]}. {fix}"
            )

    def check(
        self,
        temperature: float,
        top_k: int | None,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        vocab_size: int,
    ) -> list[str]:
        """
        Make sure that a run can use the cache.

        Args:
            temperature (`float`): Temperature of the distillation.
            top_k (`int`, *optional*): Entries of a position; all that are cached by default.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer that prepared the run's data.
            max_length (`int`, *optional*): Length that the run's rows are cut to.
            vocab_size (`int`): Number of the student's logits.

        Returns:
            `list[str]`: Warnings.

        Raises:
            `ValueError`: It cannot.
        """
        manifest, here = self.manifest, f"the teacher's cache {self.directory}"
        remake = self._remake
        if temperature <= 0:
            raise UserError(
                f"kd_temperature={temperature} is not above 0. Set it to one of {list(manifest.temperatures)}."
            )
        if temperature not in manifest.temperatures:
            raise UserError(
                f"kd_temperature={temperature} is not among the temperatures of {here}. Set it to one of "
                f"{list(manifest.temperatures)}, or {remake} --temperatures "
                f"{' '.join(map(str, sorted({*manifest.temperatures, temperature})))}."
            )
        if top_k is not None and not 1 <= top_k <= manifest.top_k:
            raise UserError(
                f"kd_top_k={top_k}, but {here} holds {manifest.top_k} tokens of each position. Set kd_top_k to "
                f"1...{manifest.top_k}, or {remake} --kd_top_k {top_k}."
            )
        if tokenizer_hash(tokenizer) != manifest.tokenizer_hash:
            raise UserError(
                f"The tokenizer has another vocabulary than the one that {here} was built with, so its token ids mean "
                f"other tokens. Use the tokenizer of {manifest.teacher!r}, or {remake}."
            )
        if chat_template_hash(tokenizer) != manifest.chat_template_hash:
            raise UserError(
                f"The chat template is not the one that {here} was built with. Set chat_template_path to that one, or "
                f"{remake}."
            )
        if max_length != manifest.max_length:
            raise UserError(
                f"max_length={max_length}, but {here} was built with max_length={manifest.max_length}: rows are truncated at other "
                f"places. Set max_length={manifest.max_length}, or {remake} --max_length {max_length}."
            )
        if manifest.largest_id >= vocab_size:
            raise UserError(
                f"{here[0].upper()}{here[1:]} has the token id {manifest.largest_id}, but the student's vocabulary has "
                f"{vocab_size} tokens. Use a teacher with the student's vocabulary, or {remake}."
            )
        return manifest.warn_of_tail(temperature)


def collate_with_teacher(
    collator: Callable[[list], Mapping[str, Any]], cache: TeacherCache, temperature: float, top_k: int, examples: list
) -> dict[str, Any]:
    """
    Collate examples with `input_ids`, and look each of them up in a teacher's cache ([`TeacherCache.lookup`]). Batches of the `collator`
    have a row for each example, in their order, padded on the right.

    Returns:
        `dict[str, Any]`: The batch, with `teacher_ids` (int32) and `teacher_log_probs` (float32) of shape
        `(batch, length, top_k)`, and `teacher_log_tail` (float32) of shape `(batch, length)`.
    """
    # It may say more of itself than a dict: which columns are padding, for example.
    batch = collator(examples)
    rows, length = batch["input_ids"].shape
    of_batch = TopK(
        torch.zeros((rows, length, top_k), dtype=torch.int32),
        torch.zeros((rows, length, top_k)),
        torch.zeros((rows, length)),
    )
    for row, example in enumerate(examples):
        of_example = cache.lookup(example["input_ids"], temperature, top_k)
        for whole, part in zip(of_batch, of_example, strict=True):
            whole[row, : part.shape[0]] = part
    batch.update(zip(_KEYS, of_batch, strict=True))
    return batch


def cached_teacher(student: nn.Module, inputs: dict[str, Any]) -> TopK:
    """The most likely tokens of a teacher that ran before, which [`collate_with_teacher`] has put into a batch."""
    return TopK(*(inputs.pop(key)[:, :-1].flatten(0, 1) for key in _KEYS))
