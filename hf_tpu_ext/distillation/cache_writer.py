"""Writes a teacher's cache, shard by shard, so that a build that is killed goes on where it was."""

import dataclasses
import errno
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from ..atomic_write import write_atomically
from ..formatting import format_bytes
from .cache_format import (
    FORMAT,
    MANIFEST,
    PROGRESS,
    CacheManifest,
    CacheSettings,
    Shard,
    find_damage,
    normalised,
    read_json,
    read_manifest,
    read_shards,
    write_shard,
)
from .compact import CompactTokens


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

    Files hold a fixed number of sequences each, in the order of `keys`. A file is written under another name first and
    then renamed, and noted in `progress.json` after that; the manifest comes last and takes its place. A build with the same
    settings continues with the files that are not there yet, so that the result is the same, byte for byte, as if it had
    never been stopped.

    Args:
        directory (`str` or `Path`): Directory of the cache.
        settings ([`CacheSettings`]): What it is made from.
        keys (`list[bytes]`): Key of each sequence, all different.
        lengths (`list[int]`): Number of tokens of each sequence.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to start over where there is a cache with other settings.
        sequences_per_shard (`int`, *optional*):
            Sequences in a file; by default 256, or fewer where that would be more than 256 MB. A build that continues keeps
            the number that it began with.

    Raises:
        `ValueError`: There is a cache with other settings, or no room.
    """

    def __init__(
        self,
        directory: str | Path,
        settings: CacheSettings,
        keys: list[bytes],
        lengths: list[int],
        overwrite: bool = False,
        sequences_per_shard: int | None = None,
    ):
        self.directory, self.settings = Path(directory), settings
        self._keys, self._lengths = keys, lengths
        fitting = _MOST_BYTES // (settings.token_bytes * max(lengths))
        self._per_shard = sequences_per_shard or max(1, min(_MOST_SEQUENCES, fitting))
        self._shards: dict[int, Shard] = {}
        self.complete = False
        self.directory.mkdir(parents=True, exist_ok=True)
        self._continue(overwrite)
        if self.complete:
            return
        self._check_room(freed=sum(path.stat().st_size for path in self._leftovers()))
        # Without the manifest nothing is taken for a whole cache. It goes when what there is to go on from is noted.
        self._note_progress()
        (self.directory / MANIFEST).unlink(missing_ok=True)
        for path in self._leftovers():
            path.unlink()

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
        """Write a file: the [`TeacherRows`] of one of [`~CacheWriter.pending`]. `ValueError` if there is no room."""
        temperatures = self.settings.temperatures
        stored = [temperatures.index(temperature) for temperature in normalised(temperatures)]
        tensors, coverage_sums, largest_id = [], np.zeros(len(temperatures)), 0
        for number, row in zip(sequences, rows, strict=True):
            ids, values, normalisers, log_tails = (tensor.numpy() for tensor in row)
            assert len(ids) == self._lengths[number]
            entries = (
                CompactTokens.pack(ids, values)._asdict() if self.settings.compact else {"ids": ids, "values": values}
            )
            tensors.append({**entries, "normalisers": normalisers[:, stored], "log_tails": log_tails})
            log_probs = values.astype(np.float32)[..., None] / np.float32(temperatures) - normalisers[:, None]
            coverage_sums += np.exp(log_probs).sum(axis=(0, 1), dtype=np.float64)
            largest_id = max(largest_id, int(ids.max()))
        keys = [self._keys[number] for number in sequences]
        data = write_shard(tensors, keys, compression="zstd" if self.settings.compact else None)
        number = sequences.start // self._per_shard
        shard = Shard(
            file=f"shard-{number:05d}.arrow",
            sequences=len(sequences),
            tokens=sum(self._lengths[number] for number in sequences),
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            coverage_sums=tuple(coverage_sums.tolist()),
            largest_id=largest_id,
        )
        with self._need_room():
            write_atomically(self.directory / shard.file, data)
        self._shards[number] = shard
        self._note_progress()

    def finish(self) -> CacheManifest:
        """Write the manifest, which makes the cache complete, and return it."""
        if not self.complete:
            assert not self.pending
            shards = [self._shards[number] for number in sorted(self._shards)]
            size, tokens = sum(shard.bytes for shard in shards), self.settings.tokens
            coverage_sums = zip(*(shard.coverage_sums for shard in shards), strict=True)
            manifest = CacheManifest(
                **dataclasses.asdict(self.settings),
                coverage=tuple(math.fsum(sums) / tokens for sums in coverage_sums),
                bytes_per_token=size / tokens,
                largest_id=max(shard.largest_id for shard in shards),
                sequences_per_shard=self._per_shard,
                shards=tuple(shards),
            )
            with self._need_room():
                write_atomically(self.directory / MANIFEST, _json(dataclasses.asdict(manifest)))
            self.complete = True
        (self.directory / PROGRESS).unlink(missing_ok=True)
        return read_manifest(self.directory)

    def _continue(self, overwrite: bool) -> None:
        """Take up what is there, if it was made with the same settings."""
        try:
            manifest, progress = (read_json(self.directory / name) for name in (MANIFEST, PROGRESS))
            found = manifest or progress
            if found is None:
                return
            self._compare(manifest or progress["settings"])
        except ValueError:
            if overwrite:
                return
            raise
        self._per_shard = found["sequences_per_shard"]
        # Whoever makes a complete cache again has a reason to doubt its files.
        for shard in read_shards(found):
            if (damage := find_damage(self.directory, shard, verify=manifest is not None)) is None:
                self._shards[int(shard.file[6:11])] = shard
            else:
                logger.warning(f"{self.directory / shard.file} {damage}, and is rebuilt.")
        self.complete = manifest is not None and not self.pending

    def _compare(self, before: dict[str, Any]) -> None:
        now = json.loads(json.dumps(dataclasses.asdict(self.settings)))
        other = [
            _HASHED.get(name, f"{name} is {now[name]!r} and was {before[name]!r}")
            for name in now
            if before[name] != now[name]
        ]
        if other:
            raise ValueError(
                f"{self.directory} holds a teacher's cache that was built with other settings: {'; '.join(other)}. Give another "
                "directory (--output_dir DIR), or start over and discard it (--overwrite)."
            )

    def _leftovers(self) -> list[Path]:
        """Files of this or another build that are no part of what it goes on from."""
        kept = {shard.file for shard in self._shards.values()}
        found = [*self.directory.glob("shard-*"), *self.directory.glob(".*.tmp")]
        return [path for path in found if path.name not in kept]

    def _note_progress(self) -> None:
        shards = [dataclasses.asdict(self._shards[number]) for number in sorted(self._shards)]
        content = {
            "settings": dataclasses.asdict(self.settings),
            "sequences_per_shard": self._per_shard,
            "shards": shards,
        }
        with self._need_room():
            write_atomically(self.directory / PROGRESS, _json(content))

    # ---- Room ----

    @property
    def bytes_to_write(self) -> int:
        """Size of the files that are not written yet."""
        return sum(
            _HEADER_BYTES + sum(self._lengths[n] * self.settings.token_bytes + _SEQUENCE_BYTES for n in sequences)
            for sequences in self.pending
        )

    def _check_room(self, freed: int) -> None:
        if self.bytes_to_write > shutil.disk_usage(self.directory).free + freed:
            raise ValueError(self._no_room("Not enough disk space"))

    @contextmanager
    def _need_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            told = f"Writing failed ({error.strerror}); what is done is kept, and the same command continues"
            raise ValueError(self._no_room(told)) from error

    def _no_room(self, what: str) -> str:
        compact = dataclasses.replace(self.settings, compact=True).token_bytes
        smaller = "a smaller --kd_top_k"
        if not self.settings.compact:
            smaller += f" or --compact ({compact} instead of {self.settings.token_bytes} bytes per token)"
        return (
            f"{what}: the teacher's cache in {self.directory} needs {format_bytes(self.bytes_to_write)} more, and "
            f"{format_bytes(shutil.disk_usage(self.directory).free)} are free there. Free some, give another directory "
            f"(--output_dir DIR), or make it smaller: {smaller}."
        )


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps({"format": FORMAT, **content}, indent=1) + "\n").encode()
