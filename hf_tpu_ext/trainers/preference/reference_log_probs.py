"""Log-probs of a preference trainer's reference, computed ahead of training (`precompute_ref_log_probs`) and kept."""

import time
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

import datasets
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.trainer_utils import unwrap_peft_model

from ...atomic_write import write_atomically
from ...backends.compiled_function import CompiledFunction
from ...backends.processes import bytes_of
from ...callbacks.run_lines import describe_compiles
from ...data.static_shapes import count_rows
from ...formatting import count
from ...layers.random_numbers import RandomNumbers
from ..checks.upstream import upstream_names


#: The kind of the program that computes them.
REFERENCE_STEP = "reference step"
# Batches whose log-probs are fetched and written together: what a run that is killed loses.
_BATCHES_OF_A_FILE = 64
# The methods of a trainer whose code runs in the program.
_METHODS = ("compute_ref_log_probs",)


class ReferenceLogProbsMixin:
    """
    The part of [`TPUDPOTrainer`] and [`TPUKTOTrainer`] that precomputes what the reference says (`precompute_ref_log_probs`).

    On XLA it is a program of its own over the declared shapes. Results are fetched for many batches at once, and kept under
    `reference_log_probs` in the cache directory of `datasets`, by a hash of everything that they depend on: the tokens, the
    collator, the reference's configuration and weights, the precision. A second run reads them, and a run that was killed goes on where it
    was. On CUDA and CPU every method is upstream's.
    """

    #: Columns that upstream's `compute_ref_log_probs` computes, in this order.
    reference_columns: tuple[str, ...]
    # Upstream asks for them while it sets itself up, when batches have no declared shapes yet.
    _can_run_reference = False

    def _set_up(self, call) -> None:
        # Upstream's would read all weights, those of an adapter among them: the reference goes without it, and it is
        # drawn anew in each run.
        with upstream_names(type(self), hash_module=self._hash_unless_static):
            super()._set_up(call)

    def _finish_set_up(self) -> None:
        super()._finish_set_up()
        if not (self.precompute_ref_logps and self.backend.static_shapes):
            return
        self._can_run_reference = True
        # What setting up has left to do is no part of the reference's graph.
        self.backend.flush()
        batch_size = self.args.precompute_ref_batch_size
        self.train_dataset = self._precompute_ref_logps(
            self.train_dataset, "train", batch_size or self.args.per_device_train_batch_size
        )
        rows = batch_size or self.args.per_device_eval_batch_size
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._precompute_ref_logps(dataset, name, rows) for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = self._precompute_ref_logps(self.eval_dataset, "eval", rows)

    @property
    def _runs_other_passes(self) -> bool:
        return not self.precompute_ref_logps

    def _hash_unless_static(self, module, hash_module: Callable) -> str | None:
        return None if self.backend.static_shapes else hash_module(module)

    def _precompute_ref_logps(self, dataset, name: str, batch_size: int):
        if not self.backend.static_shapes or not isinstance(dataset, Dataset):
            return super()._precompute_ref_logps(dataset, name, batch_size)
        if not self._can_run_reference:
            return dataset
        start_time, before = time.monotonic(), self.backend.counters()
        rows = batch_size * self.backend.num_chips
        dataset, directory = self._rows_for_reference(dataset, name, rows)
        directory.mkdir(parents=True, exist_ok=True)
        starts = range(0, len(dataset), rows * _BATCHES_OF_A_FILE)
        # The number of rows is in the name: a batch size that has changed cuts the data elsewhere.
        files = {start: directory / f"{start}-{min(start + starts.step, len(dataset))}.arrow" for start in starts}
        # What one process lacks, all compute.
        absent = [start for start, path in files.items() if not path.is_file()]
        absent = self.backend.processes.exchange(f"reference log-probs of the {name} dataset", absent)
        missing = {
            start: path for start, path in files.items() if any(start in starts_of_one for starts_of_one in absent)
        }
        done = " were found"
        if missing:
            self._write_missing(missing, dataset, name, rows)
            # The end of a run and its report count from its first step on.
            done = (
                f": {count(sum(map(_rows_of, missing.values())), 'row')} computed in {time.monotonic() - start_time:.1f} s, "
                f"{describe_compiles(self.backend.counters() - before)}, kept"
            )
        self.adapted.changes.append(f"reference log-probs of the {name} dataset{done} in {directory}")
        # The tables are read into memory, a few bytes a row: `datasets` writes what it makes of rows beside the files of a table.
        tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in files.values()]
        complete = concatenate_datasets([dataset, Dataset(pa.concat_tables(tables))], axis=1)
        complete.info.dataset_name = dataset.info.dataset_name
        return complete

    def _write_missing(self, missing: dict[int, Path], dataset: Dataset, name: str, rows: int) -> None:
        cached_rows = len(dataset) - sum(_rows_of(path) for path in missing.values())
        model = self.ref_model or self.model

        def compute(data: dict[str, dict[Hashable, Tensor]]) -> tuple[Tensor | None, ...]:
            with (
                # Those of layers that are in training, of which each iteration of a loop draws its own.
                RandomNumbers(data["numbers"]["seed"]),
                self.by_length.override_rope(),
                self.compute_loss_context_manager(),
                self.models_in_static_shapes(),
            ):
                log_probs = self.compute_ref_log_probs(model, self.by_length.take(data["batch"]))
                self.by_length.forget()
            return log_probs

        with (
            tqdm(
                desc=f"Computing reference log probs for {name} dataset",
                total=len(dataset),
                initial=cached_rows,
                unit="row",
                disable=self.args.disable_tqdm,
            ) as bar,
            self.frozen_in_bfloat16(),
            self.chips.split_activations(self.model),
            self.layers.forward_loops([model]),
        ):
            compiled = self.programs.compile(compute, [model], _METHODS, training=model.training)
            for start, path in missing.items():
                part = dataset.select(range(start, start + _rows_of(path)))
                self._write_log_probs(path, part, rows, compiled, bar)

    def _write_log_probs(self, path: Path, part: Dataset, rows: int, compute: CompiledFunction, bar: tqdm) -> None:
        loader = DataLoader(
            part,
            batch_size=rows,
            collate_fn=partial(_collate_full, self.data_collator, rows),
            num_workers=self.args.dataloader_num_workers,
        )
        run, log_probs = partial(self.programs.end, REFERENCE_STEP, "reference log-probs before training"), []
        for batch in loader:
            self.check_ranges(batch)
            data = {**batch, **self.data_by_length(batch)}
            with self.copies.unwatched():
                seed = {"seed": self.seeds.beside(len(log_probs))}
                log_probs.append(compute(self._send_rows(data, count_rows(batch), seed), run))
            bar.update(min(rows, len(part) - rows * (len(log_probs) - 1)))
        host_log_probs = self.backend.fetch(log_probs)
        columns = {
            # The rows that completed the last batch are at the end.
            name: torch.cat(values)[: len(part)].float().numpy()
            for name, values in zip(self.reference_columns, zip(*host_log_probs, strict=True), strict=True)
            # KTO losses without a KL term have none.
            if values[0] is not None
        }
        sink = pa.BufferOutputStream()
        table = pa.table(columns)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        write_atomically(path, sink.getvalue().to_pybytes())

    def _rows_for_reference(self, dataset: Dataset, name: str, rows: int) -> tuple[Dataset, Path]:
        """Rows for batches of `rows`, and the directory of their log-probs, by everything that they depend on."""
        digest = blake2b(self._hash_of_reference, digest_size=16)
        columns = sorted(column for column in dataset.column_names if column.endswith("_ids"))
        for table in dataset.with_format("arrow", columns=columns).iter(10_000):
            for batch in table.combine_chunks().to_batches():
                digest.update(batch.serialize())
        settings = (self.data_collator, self.adapted.compute_dtype, vars(self.args).get("ld_alpha"))
        digest.update(Hasher.hash(settings).encode())
        return dataset, Path(datasets.config.HF_DATASETS_CACHE) / "reference_log_probs" / digest.hexdigest()

    @cached_property
    def _hash_of_reference(self) -> bytes:
        """Of the configuration and all weights of the reference, which stay as they are while log-probs of it are asked for."""
        model = self.ref_model or self.model
        digest = blake2b(unwrap_peft_model(model).config.to_json_string().encode(), digest_size=16)
        # The reference goes without the adapter that is trained.
        adapters = set(model.active_adapters) if isinstance(model, PeftModel) else set()
        weights = {key: value for key, value in model.state_dict().items() if not adapters & set(key.split("."))}
        for key, value in sorted(self.backend.fetch(weights).items()):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(bytes_of(value))
        return digest.digest()


def _rows_of(path: Path) -> int:
    start, end = map(int, path.stem.split("-"))
    return end - start


def _collate_full(collator: Callable, rows: int, examples: list[dict]) -> dict:
    """Collate a batch that has `rows` examples. The last one of a dataset is completed by copies, for its shape to be the same."""
    return collator(examples + examples[-1:] * (rows - len(examples)))
