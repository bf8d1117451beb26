"""What the files of a teacher's cache hold."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .compact import compact_bytes_per_token


MANIFEST = "manifest.json"
#: What stands in the place of the manifest until the last shard is written.
PROGRESS = "progress.json"
FORMAT = "hf_tpu_ext teacher cache 1"
#: Less of the teacher's mass than this in the top K is a warning.
LOW_COVERAGE = 0.5
MAKE = "hf-tpu cache-teacher --config recipe.yaml --kd_cache"


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """
    What a cache was made from. A build continues only with the same.

    Args:
        teacher (`str`):
            Path or name of the teacher.
        teacher_hash (`str`):
            Hash of a sample of its weights.
        tokenizer_hash (`str`):
            Hash of the tokenizer's vocabulary.
        chat_template_hash (`str`):
            Hash of its chat template.
        vocab_size (`int`):
            Number of the teacher's logits.
        top_k (`int`):
            Entries of a position.
        temperatures (`tuple[float, ...]`):
            Temperatures that it can be used at, ascending.
        max_length (`int`, *optional*):
            Length that rows were cut to.
        compute_dtype (`str`):
            What the teacher computed in, e.g. `"bfloat16"`.
        compact (`bool`):
            Whether the compact form is used.
        dataset_hash (`str`):
            Hash of the keys of all sequences in their order.
        sequences (`int`):
            Different sequences.
        tokens (`int`):
            Tokens in them.
    """

    teacher: str
    teacher_hash: str
    tokenizer_hash: str
    chat_template_hash: str
    vocab_size: int
    top_k: int
    temperatures: tuple[float, ...]
    max_length: int | None
    compute_dtype: str
    compact: bool
    dataset_hash: str
    sequences: int
    tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one position; a sequence takes 24 more."""
        entries = compact_bytes_per_token(self.top_k, self.vocab_size) if self.compact else 6 * self.top_k
        return entries + 4 * len(normalised(self.temperatures)) + 2 * len(self.temperatures)


@dataclasses.dataclass(frozen=True)
class Shard:
    """
    A file of a cache.

    Args:
        file (`str`):
            Its name.
        sequences (`int`):
            Sequences in it.
        tokens (`int`):
            Tokens in them.
        bytes (`int`):
            Its size.
        sha256 (`str`):
            Its checksum.
        coverage_sums (`tuple[float, ...]`):
            For each temperature, the sum over positions of the teacher's mass in the top K.
        largest_id (`int`):
            Largest token id among the entries.
    """

    file: str
    sequences: int
    tokens: int
    bytes: int
    sha256: str
    coverage_sums: tuple[float, ...]
    largest_id: int


@dataclasses.dataclass(frozen=True)
class CacheManifest(CacheSettings):
    """
    What a complete cache holds.

    Args:
        coverage (`tuple[float, ...]`):
            For each temperature, the mean of the teacher's mass in the top K.
        bytes_per_token (`float`):
            Size of all shards by the number of tokens.
        largest_id (`int`):
            Largest token id among the entries.
        sequences_per_shard (`int`):
            Sequences in each file but the last.
        shards (`tuple[Shard, ...]`):
            The files.
        **kwargs:
            All fields of [`CacheSettings`].
    """

    coverage: tuple[float, ...]
    bytes_per_token: float
    largest_id: int
    sequences_per_shard: int
    shards: tuple[Shard, ...]


def normalised(temperatures: tuple[float, ...]) -> list[float]:
    """
    Temperatures that a normaliser is stored for. That of temperature 1 is 0.

    Args:
        temperatures (`tuple[float, ...]`):
            Temperatures of the cache.

    Returns:
        `list[float]`: All others.
    """
    return [temperature for temperature in temperatures if temperature != 1]


def sequence_key(input_ids: list[int] | np.ndarray) -> bytes:
    """
    Name of a sequence: a hash of its token ids and nothing else.

    Args:
        input_ids (`list[int]` or `np.ndarray` of shape `(length,)`):
            Token ids without padding.

    Returns:
        `bytes`: 16 bytes.
    """
    return hashlib.blake2b(np.asarray(input_ids, dtype="<i4").tobytes(), digest_size=16).digest()


def dataset_sequences(dataset: Dataset) -> Iterator[np.ndarray]:
    """
    Go through the sequences of a prepared dataset.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset with an `input_ids` column.

    Yields:
        `np.ndarray` of shape `(length,)`: Token ids of a row.
    """
    for rows in dataset.with_format("numpy", columns=["input_ids"]).iter(batch_size=1000):
        yield from rows["input_ids"]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Hash of which id stands for which token.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.

    Returns:
        `str`: Hexadecimal digits.
    """
    return _hash(tokenizer.get_vocab())


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Hash of a tokenizer's chat template.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer, with or without one.

    Returns:
        `str`: Hexadecimal digits.
    """
    return _hash(tokenizer.chat_template)


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def describe_coverage(coverage: float, temperature: float, top_k: int) -> str:
    """
    Words for a temperature that a cache does not support well.

    Args:
        coverage (`float`):
            Mean of the teacher's mass in the top K.
        temperature (`float`):
            Temperature.
        top_k (`int`):
            Entries of a position.

    Returns:
        `str`: One line.
    """
    return (
        f"The top {top_k} tokens hold {coverage:.0%} of the teacher's mass at temperature {temperature:g}: most of what it "
        "teaches there is in the one bucket of all other tokens. Take a lower temperature or a larger kd_top_k."
    )


def find_damage(directory: Path, shard: Shard, verify: bool) -> str | None:
    """
    Say what is wrong with a file.

    Args:
        directory (`Path`):
            Directory of the cache.
        shard ([`Shard`]):
            The file as it was written.
        verify (`bool`):
            Whether to compare the checksum.

    Returns:
        `str` or `None`: What is wrong; `None` for nothing.
    """
    path = directory / shard.file
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != shard.bytes:
        return f"has {size} bytes, not the {shard.bytes} that were written"
    if verify:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                return "was changed: its checksum is not the one in the manifest"
    return None


def read_json(path: Path) -> dict[str, Any] | None:
    """
    Read the manifest or the progress of a cache.

    Args:
        path (`Path`):
            The file.

    Returns:
        `dict[str, Any]` or `None`: Its content; `None` where there is none.

    Raises:
        `ValueError`: It is not of a cache of this version.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if isinstance(content, dict) and content.pop("format", None) == FORMAT:
        return content
    raise ValueError(
        f"{path} was not written by this version (expected format {FORMAT!r}). Give another directory, or make the cache "
        f"anew: {MAKE} {path.parent} --overwrite."
    )


def read_shards(content: dict[str, Any]) -> tuple[Shard, ...]:
    """
    Take the files out of what [`read_json`] gave.

    Args:
        content (`dict[str, Any]`):
            Content of a manifest or a progress.

    Returns:
        `tuple[Shard, ...]`: The files.
    """
    return tuple(Shard(**{**shard, "coverage_sums": tuple(shard["coverage_sums"])}) for shard in content["shards"])


def read_manifest(directory: Path) -> CacheManifest:
    """
    Read what a complete cache holds.

    Args:
        directory (`Path`):
            Directory of the cache.

    Returns:
        [`CacheManifest`]: Its manifest.

    Raises:
        `ValueError`: There is no cache, or it is not complete.
    """
    content = read_json(directory / MANIFEST)
    if content is None:
        progress = read_json(directory / PROGRESS)
        if progress is not None:
            done = sum(shard["sequences"] for shard in progress["shards"])
            raise ValueError(
                f"The teacher's cache {directory} is not complete: {done} of {progress['settings']['sequences']} sequences "
                f"are there. Finish it with the command that began it: {MAKE} {directory}."
            )
        raise ValueError(f"kd_cache={str(directory)!r} holds no teacher's cache. Make it: {MAKE} {directory}.")
    content = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    return CacheManifest(**{**content, "shards": read_shards(content)})


def mean_coverage(shards: list[Shard]) -> tuple[float, ...]:
    """
    Mean of the teacher's mass in the top K.

    Args:
        shards (`list[Shard]`):
            All files of a cache.

    Returns:
        `tuple[float, ...]`: One for each temperature.
    """
    tokens = sum(shard.tokens for shard in shards)
    return tuple(math.fsum(sums) / tokens for sums in zip(*(shard.coverage_sums for shard in shards), strict=True))
