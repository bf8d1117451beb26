"""
What the files of a teacher's cache hold. For each position with logits `z`:

- `ids`, int32, K: the ids of the K largest logits, the largest first;
- `values`, float16, K: `z[i] - logsumexp(z)`, their log-probs at temperature 1;
- `normalisers`, float32, one for each temperature but 1: `logsumexp(z / T) - logsumexp(z) / T`, so that a log-prob at temperature T is
  `value / T - normaliser`;
- `log_tails`, float16, one for each temperature: the logarithm of the mass of all other tokens.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError


MANIFEST = "manifest.json"
FORMAT = "hf_tpu_ext teacher cache 2"
# Less of the teacher's mass than this in the top K is a warning.
_LOW_COVERAGE = 0.5
MAKE = "hf-tpu cache-teacher --config recipe.yaml --kd_cache"


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """
    What a cache was made from. A build continues only with the same.

    Args:
        teacher (`str`): Path or name of the teacher.
        teacher_hash (`str`): Hash of a sample of its weights.
        tokenizer_hash (`str`): Hash of the tokenizer's vocabulary.
        chat_template_hash (`str`): Hash of its chat template.
        vocab_size (`int`): Number of the teacher's logits.
        top_k (`int`): Entries of a position.
        temperatures (`tuple[float, ...]`): Temperatures that it can be used at, ascending.
        max_length (`int`, *optional*): Length that rows were cut to.
        compute_dtype (`str`): What the teacher computed in, e.g. `"bfloat16"`.
        dataset_hash (`str`): Hash of the keys of all sequences in their order.
        sequences (`int`): Different sequences.
        tokens (`int`): Tokens in them.
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
    dataset_hash: str
    sequences: int
    tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one position."""
        return 6 * self.top_k + 4 * len(temperatures_with_normaliser(self.temperatures)) + 2 * len(self.temperatures)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file of a cache."""

    file: str
    sequences: int
    tokens: int
    bytes: int
    sha256: str
    #: For each temperature, the sum over positions of the teacher's mass in the top K.
    coverage_sums: tuple[float, ...]
    #: Largest token id among the entries.
    largest_id: int


@dataclasses.dataclass(frozen=True)
class CacheManifest(CacheSettings):
    """
    What a cache holds, complete or not: it is written anew after each file.

    Args:
        sequences_per_shard (`int`): Sequences in each file but the last.
        shards (`tuple[Shard, ...]`): The files that are written.
        **kwargs: All fields of [`CacheSettings`].
    """

    sequences_per_shard: int
    shards: tuple[Shard, ...]

    @property
    def sequences_written(self) -> int:
        """Sequences in the files that are written."""
        return sum(shard.sequences for shard in self.shards)

    @property
    def is_complete(self) -> bool:
        """Whether all files are written."""
        return self.sequences_written == self.sequences

    @property
    def coverage(self) -> tuple[float, ...]:
        """For each temperature, the mean of the teacher's mass in the top K of a complete cache."""
        of_shards = zip(*(shard.coverage_sums for shard in self.shards), strict=True)
        return tuple(math.fsum(sums) / self.tokens for sums in of_shards)

    @property
    def bytes_per_token(self) -> float:
        """Size of all files of a complete cache by the number of tokens."""
        return sum(shard.bytes for shard in self.shards) / self.tokens

    @property
    def largest_id(self) -> int:
        """Largest token id among the entries."""
        return max(shard.largest_id for shard in self.shards)

    def warn_of_tail(self, temperature: float) -> list[str]:
        """The warning, if one is due, that the top K hold little of the teacher's mass at one of the temperatures."""
        share = self.coverage[self.temperatures.index(temperature)]
        if share >= _LOW_COVERAGE:
            return []
        return [
            f"The top {self.top_k} tokens hold {share:.0%} of the teacher's mass at temperature {temperature:g}: most of its mass "
            "is in the tail bucket. Set a lower temperature or a larger kd_top_k."
        ]


def temperatures_with_normaliser(temperatures: tuple[float, ...]) -> list[float]:
    """Temperatures of a cache that a normaliser is stored for: all but 1, whose own is 0."""
    return [temperature for temperature in temperatures if temperature != 1]


def sequence_key(input_ids: list[int] | np.ndarray) -> bytes:
    """Name of a sequence without padding: 16 bytes, a hash of its token ids and nothing else."""
    return hashlib.blake2b(np.asarray(input_ids, dtype="<i4").tobytes(), digest_size=16).digest()


def dataset_sequences(dataset: Dataset) -> Iterator[np.ndarray]:
    """Token ids of each row of a prepared dataset, of shape `(length,)`."""
    for rows in dataset.with_format("numpy", columns=["input_ids"]).iter(batch_size=1000):
        yield from rows["input_ids"]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of which id stands for which token."""
    return _hash(tokenizer.get_vocab())


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's chat template, if it has one."""
    return _hash(tokenizer.chat_template)


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def find_damage(directory: Path, shard: Shard, verify: bool) -> str | None:
    """Say what is wrong with a file, its checksum compared if `verify`; `None` for nothing."""
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


def write_shard(tensors: list[dict[str, np.ndarray]], keys: list[bytes]) -> bytes:
    """An Arrow file with a record batch of `(tokens, size)` arrays for each sequence, to be read one by one."""
    batches = [
        pa.record_batch(
            {
                name: pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
                for name, array in sequence.items()
                if array.shape[1]
            }
        )
        for sequence in tensors
    ]
    file = pa.BufferOutputStream()
    schema = batches[0].schema.with_metadata({"keys": b"".join(keys)})
    with pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return file.getvalue().to_pybytes()


def read_sequence(shard: pa.ipc.RecordBatchFileReader, number: int) -> dict[str, np.ndarray]:
    """The arrays of one sequence of a file, as [`write_shard`] was given them."""
    batch = shard.get_batch(number)
    # Copied, because what is mapped cannot be written, and PyTorch warns of that.
    return {
        name: np.array(batch[name].flatten().to_numpy(zero_copy_only=False)).reshape(len(batch), -1)
        for name in batch.schema.names
    }


def shard_name(number: int) -> str:
    """Name of a file of a cache."""
    return f"shard-{number:05d}.arrow"


def shard_number(name: str) -> int:
    """The number of a file of a cache, which has more than five digits from 100,000 files on."""
    return int(name.removeprefix("shard-").removesuffix(".arrow"))


def names_of_shards(sequences: int, sequences_per_shard: int) -> list[str]:
    """Names of all files of a cache besides its manifest."""
    return [shard_name(number) for number in range(-(-sequences // sequences_per_shard))]


def read_manifest(directory: Path) -> CacheManifest | None:
    """Read what a cache holds, `None` where there is none; `ValueError` if the file is of something else or another version."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    # Caches that an earlier version built with --compact have this format, too, but other arrays.
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("compact"):
        raise UserError(
            f"{path} is not of a teacher's cache that this version can read (format {FORMAT!r}), and is left as it is. Give another "
            f"directory ({MAKE} DIR), or move the file away."
        )
    # Earlier versions also wrote what is computed from the files now.
    values = {field.name: content[field.name] for field in dataclasses.fields(CacheManifest)}
    values["temperatures"] = tuple(values["temperatures"])
    values["shards"] = tuple(
        Shard(**{**shard, "coverage_sums": tuple(shard["coverage_sums"])}) for shard in values["shards"]
    )
    return CacheManifest(**values)
