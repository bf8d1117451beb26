"""Runs a teacher over sequences, in static shapes, and writes what it says to a cache."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction, end_unwatched
from ..data.static_shapes import pad_rows
from ..layers.attention import static_masks
from ..layers.batch_length import BatchLength
from ..step.fingerprint import compile_alone
from .cache_format import CacheManifest, dataset_sequences, sequence_key
from .cache_writer import CacheWriter
from .fused_head import Head, split_tokens
from .teachers import run_to_head


# Logits of one chunk of tokens: 64 MB in float32.
_CHUNK_ELEMENTS = 2**24


class TeacherRows(NamedTuple):
    """
    A teacher's next-token distributions as a cache holds them, for any of its temperatures.

    The log-probability of an entry at temperature T is `values / T - normalisers[:, index of T]`.

    Args:
        ids (`torch.Tensor` of shape `(tokens, top_k)`): Token ids in int32, most likely first.
        values (`torch.Tensor` of shape `(tokens, top_k)`): Finite log-probabilities at temperature 1 in float16.
        normalisers (`torch.Tensor` of shape `(tokens, num_temperatures)`):
            `logsumexp(logits / T) - logsumexp(logits) / T` in float32.
        log_tails (`torch.Tensor` of shape `(tokens, num_temperatures)`):
            Logarithm of the mass of all other tokens in float16; `-inf` where there are none.
    """

    ids: Tensor
    values: Tensor
    normalisers: Tensor
    log_tails: Tensor

    @classmethod
    def of(cls, logits: Tensor, top_k: int, temperatures: tuple[float, ...]) -> "TeacherRows":
        """The `top_k` most likely tokens of logits `(tokens, vocabulary)`, normalised for each temperature."""
        largest, ids = logits.topk(top_k)
        # Their sum, not a difference to 1, which would be rounding alone where the teacher is sure of itself.
        others = logits.scatter(-1, ids, -math.inf)
        logsumexp = logits.logsumexp(-1, keepdim=True)
        by_temperature = [(logits / temperature).logsumexp(-1, keepdim=True) for temperature in temperatures]
        normalisers = [at - logsumexp / t for at, t in zip(by_temperature, temperatures, strict=True)]
        log_tails = [
            (others / t).logsumexp(-1, keepdim=True) - at for at, t in zip(by_temperature, temperatures, strict=True)
        ]
        # A token that the model never says has a logit of -inf, which would make NaN of 0 times it.
        values = (largest - logsumexp).clamp(min=torch.finfo(torch.float16).min)
        return cls(ids.int(), values.half(), torch.cat(normalisers, -1).float(), torch.cat(log_tails, -1).half())


def top_k_rows(
    head: Head, top_k: int, temperatures: tuple[float, ...], backend: Backend, dtype: torch.dtype | None = None
) -> TeacherRows:
    """
    Take the most likely tokens of a teacher's [`Head`], a chunk of tokens at a time; `dtype` is that of the product.

    On XLA the chunks are the iterations of one loop, so that no more than one chunk's logits exist; on several chips each
    goes through its own rows.
    """
    if backend.num_chips > 1:
        head = head.full_to_shard(backend)
    tokens = head.hidden.shape[0]
    chunks = split_tokens(head.hidden, max(8, _CHUNK_ELEMENTS // head.weight.shape[0]))
    compute_dtype = head.hidden.dtype if dtype is None else dtype

    def top_k_of_chunk(carry: tuple, chunk: tuple[Tensor]) -> tuple[tuple, tuple]:
        logits = head._replace(hidden=chunk[0]).logits(compute_dtype)
        return carry, tuple(TeacherRows.of(logits, top_k, temperatures))

    _, results = backend.loops.scan(top_k_of_chunk, (), (chunks,))
    results = (result.reshape(-1, result.shape[-1])[:tokens] for result in results)
    if backend.num_chips > 1:
        results = (backend.manual_sharding.shard_to_full(result) for result in results)
    return TeacherRows(*results)


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
            rows = self._compiled(inputs, end_unwatched, top_k=top_k, temperatures=temperatures)
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


def build_cache(teacher: TeacherRun, sequences: Sequences, writer: CacheWriter, quiet: bool = False) -> CacheManifest:
    """
    Run a teacher over all sequences that the cache does not have yet. The processes of the `writer` share the work, each with a
    teacher of its own, and the first shows the progress of all.

    Args:
        teacher ([`TeacherRun`]): The teacher.
        sequences ([`Sequences`]): The sequences.
        writer ([`CacheWriter`]): Writes the cache.
        quiet (`bool`, *optional*, defaults to `False`): Whether to show no progress.

    Returns:
        [`CacheManifest`]: What the complete cache holds.
    """
    settings, processes, pending = writer.settings, writer.processes, writer.pending
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
