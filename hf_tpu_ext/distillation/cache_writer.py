"""Writes a teacher's cache, shard by shard, so that a build that is killed goes on where it was."""

import dataclasses
import errno
import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from ..atomic_write import write_atomically
from ..backends.processes import ALONE, Processes
from ..errors import UserError
from ..formatting import format_bytes
from .cache_format import (
    FORMAT,
    MANIFEST,
    CacheManifest,
    CacheSettings,
    Shard,
    find_damage,
    names_of_shards,
    read_manifest,
    shard_name,
    shard_number,
    temperatures_with_normaliser,
    write_shard,
)


logger = logging.get_logger(__name__)

# A file holds at most so many sequences, and bytes, unless its one sequence has more.
_MOST_SEQUENCES, _MOST_BYTES = 256, 2**28
_HASHED = {
    "teacher_hash": "the teacher has other weights",
    "tokenizer_hash": "the tokenizer has another vocabulary",
    "chat_template_hash": "the chat template has changed",
    "dataset_hash": "the prepared data have changed",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What Arrow writes of a shard and of each sequence besides the arrays.
_HEADER_BYTES, _SEQUENCE_BYTES = 1024, 512


class CacheWriter:
    """
    Writes a cache.

    Files hold as many sequences each as when the build began, in the order of `keys`. A file is written under another name
    first and then renamed, and listed in the manifest after that; the cache is complete when all are listed. A build with the
    same settings continues with the files that are not there yet, so that the result is the same, byte for byte, as if it had
    never been stopped.

    What else is in the directory stays as it is. A file by the name of one of the cache's that no earlier build has announced by
    its manifest is not overwritten, but refused.

    Args:
        directory (`str` or `Path`): Directory of the cache.
        settings ([`CacheSettings`]): What it is made from.
        keys (`list[bytes]`): Key of each sequence, all different.
        lengths (`list[int]`): Number of tokens of each sequence.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to start over where there is a cache with other settings.
        processes ([`Processes`], *optional*):
            The processes that build it together, each of which makes one of these with the same arguments. They write a file
            each at a time, and the first notes them. By default there is one.

    Raises:
        `ValueError`: There is a cache with other settings, a file that is not of a cache, or no room.
    """

    def __init__(
        self,
        directory: str | Path,
        settings: CacheSettings,
        keys: list[bytes],
        lengths: list[int],
        overwrite: bool = False,
        processes: Processes = ALONE,
    ):
        self.directory, self.settings = Path(directory), settings
        self._keys, self._lengths = keys, lengths
        fitting = _MOST_BYTES // (settings.token_bytes * max(lengths))
        self._per_shard = max(1, min(_MOST_SEQUENCES, fitting))
        self._shards: dict[int, Shard] = {}
        self.processes = processes
        same = len(set(processes.exchange("the settings of a cache", settings))) == 1
        assert same, "processes have prepared different data"
        # All processes go on from the directory as the first finds it.
        self._per_shard, self._shards = processes.by_first("the beginning of a cache", partial(self._begin, overwrite))

    def _begin(self, overwrite: bool) -> tuple[int, dict[int, Shard]]:
        self.directory.mkdir(parents=True, exist_ok=True)
        announced_files = self._continue(overwrite)
        if not self.complete:
            self._clear(announced_files)
        return self._per_shard, self._shards

    def _clear(self, announced_files: set[str]) -> None:
        """Delete what is left of `announced_files` that are not current, and announce those of this build."""
        current = {shard.file for shard in self._shards.values()}
        for name in names_of_shards(len(self._keys), self._per_shard):
            if name not in announced_files and (self.directory / name).exists():
                raise UserError(
                    f"{self.directory / name} is not of a teacher's cache that this version has begun in this directory, and is left as it "
                    "is. Give another directory (--output_dir DIR), or move the file away: a build that an earlier version has begun "
                    "starts over."
                )
        leftovers = [self.directory / name for name in announced_files - current]
        # `write_atomically` leaves parts of files where it is killed.
        names = {*announced_files, MANIFEST} if announced_files else set()
        for path in self.directory.glob(".*.tmp"):
            match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", path.name)
            if match is not None and match[1] in names:
                leftovers.append(path)
        leftovers = [path for path in leftovers if path.is_file()]
        room = shutil.disk_usage(self.directory).free + sum(path.stat().st_size for path in leftovers)
        if self.bytes_to_write > room:
            raise UserError(self._no_room("Not enough disk space"))
        # They are deleted while the manifest that announces them is there.
        for path in leftovers:
            path.unlink()
        self._write_manifest()

    @property
    def complete(self) -> bool:
        """Whether all files are written."""
        return not self.pending

    @property
    def pending(self) -> list[range]:
        """Numbers of the sequences of each file that is not written yet."""
        count = len(self._keys)
        starts = range(0, count, self._per_shard)
        return [
            range(start, min(start + self._per_shard, count))
            for number, start in enumerate(starts)
            if number not in self._shards
        ]

    def write(self, sequences: range, rows: list[Any]) -> None:
        """
        Write a file: the [`TeacherRows`] of one of [`~CacheWriter.pending`]. All processes come here as often; one that has none
        left has an empty range. `ValueError` if there is no room, or the teacher's answer is not one.
        """
        own_entry = self._write_file(sequences, rows) if sequences else None
        self._shards |= dict(
            entry for entry in self.processes.exchange("a file of a cache", own_entry) if entry is not None
        )
        if self.processes.index == 0:
            self._write_manifest()

    def _write_file(self, sequences: range, rows: list[Any]) -> tuple[int, Shard]:
        temperatures = self.settings.temperatures
        columns = [temperatures.index(temperature) for temperature in temperatures_with_normaliser(temperatures)]
        tensors, coverage_sums, largest_id = [], np.zeros(len(temperatures)), 0
        for number, row in zip(sequences, rows, strict=True):
            ids, values, normalisers, log_tails = (tensor.numpy() for tensor in row)
            assert len(ids) == self._lengths[number]
            self._check(number, ids, values)
            tensors.append(
                {"ids": ids, "values": values, "normalisers": normalisers[:, columns], "log_tails": log_tails}
            )
            log_probs = values.astype(np.float32)[..., None] / np.float32(temperatures) - normalisers[:, None]
            coverage_sums += np.exp(log_probs).sum(axis=(0, 1), dtype=np.float64)
            largest_id = max(largest_id, int(ids.max()))
        keys = [self._keys[number] for number in sequences]
        data = write_shard(tensors, keys)
        number = sequences.start // self._per_shard
        shard = Shard(
            file=shard_name(number),
            sequences=len(sequences),
            tokens=sum(self._lengths[number] for number in sequences),
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            coverage_sums=tuple(coverage_sums.tolist()),
            largest_id=largest_id,
        )
        self._write_whole(shard.file, data)
        return number, shard

    def _check(self, number: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Refuse what no teacher can mean, before it is kept for many runs."""
        if not np.isfinite(values).all():
            position = np.flatnonzero(~np.isfinite(values).all(axis=1))[0]
            raise UserError(
                f"The teacher's log-probs at position {position} of sequence {number} are not numbers. Set bf16=False, or take another "
                "teacher."
            )
        if ids.min() < 0 or ids.max() >= self.settings.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise UserError(
                f"The teacher says the token id {wrong} in sequence {number}, but its config.json has a vocab_size of "
                f"{self.settings.vocab_size}. Use a teacher whose output head has as many rows as vocab_size says."
            )

    def finish(self) -> CacheManifest:
        """Make sure that all files are there, and return what the cache holds."""
        assert self.complete
        self.processes.by_first("the end of a cache", self._check_files)
        return self._manifest

    def _check_files(self) -> None:
        for shard in self._manifest.shards:
            if (damage := find_damage(self.directory, shard, verify=False)) is not None:
                raise UserError(
                    f"{self.directory / shard.file} {damage}. Processes of several machines have to write to the same "
                    "directory: give one that all of them see, --output_dir DIR"
                )

    def _continue(self, overwrite: bool) -> set[str]:
        """
        Take up what is there, if it was made with the same settings. Returns the names of the files that were announced: those
        of this cache or one that is to be discarded.
        """
        earlier = read_manifest(self.directory)
        if earlier is None:
            return set()
        if differences := self._differences(earlier):
            if not overwrite:
                raise UserError(
                    f"{self.directory} holds a teacher's cache that was built with other settings: {'; '.join(differences)}. Give "
                    "another directory (--output_dir DIR), or start over and discard it (--overwrite)."
                )
        else:
            self._per_shard = earlier.sequences_per_shard
            for shard in earlier.shards:
                # Whoever makes a complete cache again has a reason to doubt its files.
                if (damage := find_damage(self.directory, shard, verify=earlier.is_complete)) is None:
                    self._shards[shard_number(shard.file)] = shard
                else:
                    logger.warning(f"{self.directory / shard.file} {damage}, and is rebuilt.")
        return set(names_of_shards(earlier.sequences, earlier.sequences_per_shard))

    def _differences(self, earlier: CacheSettings) -> list[str]:
        current, before = vars(self.settings), vars(earlier)
        return [
            _HASHED.get(name, f"{name} is {value!r} and was {before[name]!r}")
            for name, value in current.items()
            if value != before[name]
        ]

    @property
    def _manifest(self) -> CacheManifest:
        shards = tuple(shard for _, shard in sorted(self._shards.items()))
        return CacheManifest(**vars(self.settings), sequences_per_shard=self._per_shard, shards=shards)

    def _write_manifest(self) -> None:
        content = {"format": FORMAT, **dataclasses.asdict(self._manifest)}
        self._write_whole(MANIFEST, json.dumps(content, indent=1) + "\n")

    # ---- Room ----

    @property
    def bytes_to_write(self) -> int:
        """Size of the files that are not written yet."""
        return sum(
            _HEADER_BYTES + sum(self._lengths[n] * self.settings.token_bytes + _SEQUENCE_BYTES for n in sequences)
            for sequences in self.pending
        )

    def _write_whole(self, name: str, data: bytes | str) -> None:
        """Write a file, which appears when it is complete. A full disk is a `ValueError`."""
        try:
            write_atomically(self.directory / name, data)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            failure = f"Writing failed ({error.strerror}); what is done is kept, and the same command continues"
            raise UserError(self._no_room(failure)) from error

    def _no_room(self, what: str) -> str:
        return (
            f"{what}: the teacher's cache in {self.directory} needs {format_bytes(self.bytes_to_write)} more, and "
            f"{format_bytes(shutil.disk_usage(self.directory).free)} are free there. Free some, give another directory "
            f"(--output_dir DIR), or make it smaller: a smaller --kd_top_k."
        )
