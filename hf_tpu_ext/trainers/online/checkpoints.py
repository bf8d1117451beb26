"""Completions in checkpoints: a run that is resumed goes on with those that it was trained on."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler

from ...errors import UserError
from ...formatting import count, kind_of_device, number_setting
from ...temporarily import temporarily


#: What is padded on the left, to the length of prompts. All else that has a value for each token is of the completion.
OF_PROMPTS = ("prompt_ids", "prompt_mask")
_FILE = "rollouts.safetensors"
# Micro-steps that were taken; rows of each, and of a generation.
_STEP, _ROWS, _GENERATION = "step", "rows", "generation_rows"
# After the name of a tensor: the columns that the process of each row had.
_COLUMNS = " (columns)"


class RolloutCheckpoints:
    """
    The part of [`RolloutMixin`] that saves and resumes the batches of a generation, of which some steps are still to come.

    Upstream saves none of it: a run that it resumes generates anew, and takes other slices of what it has generated. After an
    epoch it also takes the prompts in the order of the first epoch.
    """

    # The sampler of the run under way.
    _train_sampler: Sampler | None = None

    def _get_train_sampler(self, *args, **kwargs) -> Sampler | None:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        epochs, steps = super()._init_training_state(*args, **kwargs)
        sampler = self._train_sampler
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            for _ in range(epochs):
                # As the sampler does when an epoch begins.
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return epochs, steps

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        numbers = {_STEP: self._step, _ROWS: self._rows_of_micro_step, _GENERATION: self.generation_rows}
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        if self._step % (self.generation_batches * self.num_iterations):
            # A run that is resumed where no generation is kept has none before its first step.
            for index, batch in enumerate(self._buffered_inputs or ()):
                # Copied, since safetensors refuses tensors that share memory: batches are slices of one tensor, and a number is in all.
                tensors |= {f"{index}.{key}": value.clone() for key, value in self._rows_of_all(batch).items()}
        if self.args.should_save:
            save_file(tensors, Path(output_dir) / _FILE)

    @property
    def _rows_of_micro_step(self) -> int:
        return self._train_batch_size * self.backend.processes.row_shards

    def _rows_of_all(self, batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """What this process and the others are trained on in a micro-step; nothing where a resumed run is to generate anew."""
        gather, own_rows = self.backend.processes.gather, self.backend.processes.own_rows
        has_images = batch.get("num_images") is not None
        if self._is_vlm and (has_images or own_rows and not self.backend.static_shapes):
            # Rows of images are not those of the batch, and each process has another number of them.
            return {}
        if own_rows:
            # Each has padded its own to the longest.
            if self.backend.static_shapes:
                batch = self._pad_batch(batch, self.lengths[-1])
            else:
                batch, gather = self._pad_as_others(batch), self.accelerator.gather
        # A number is that of all rows.
        return {key: gather(value) if value.ndim else value for key, value in batch.items() if value is not None}

    def _pad_as_others(self, batch: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Pad what upstream has padded to the longest of this process to the longest of all, and note what it was."""
        padded_batch = {}
        for key, value in batch.items():
            if value is None:
                continue
            fill = self._pad_token_id if key.endswith("_ids") else 0
            padded_batch[key] = self.accelerator.pad_across_processes(
                value, dim=1, pad_index=fill, pad_first=key in OF_PROMPTS
            )
            if value.ndim == 2:
                padded_batch[key + _COLUMNS] = torch.full((len(value),), value.shape[1], device=value.device)
        return padded_batch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # A checkpoint has no texts: of a generation that a resumed run goes on with, upstream would write a table without rows over
        # that of the run before.
        with temporarily(self, log_completions=self.log_completions and len(self._logs["prompt"]) > 0):
            super().log(logs, start_time)

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        checkpoint = super()._find_checkpoint(resume_from_checkpoint)
        if checkpoint is not None and (Path(checkpoint) / _FILE).is_file():
            tensors = load_file(Path(checkpoint) / _FILE)
            step, rows, generation = (int(tensors.pop(name)) for name in (_STEP, _ROWS, _GENERATION))
            num_workers = self._resumed_state["num_workers"]
            if num_workers != self.chips.batch_state()["num_workers"]:
                self._keep_generation(generation, num_workers)
                self._keep_texts_of_generation()
            # As many rows as before, in steps of this run's.
            self._step = step * rows // self._rows_of_micro_step
            self._buffered_inputs = self._split_again(tensors)
        return checkpoint

    def _keep_generation(self, rows: int, num_workers: int) -> None:
        """Generate as many rows as the run that is resumed has on another number of chips."""
        args, at_once = self.args, self._rows_of_micro_step
        if rows % at_once:
            backend = self.backend.name
            raise UserError(
                f"The checkpoint was written with {rows} rows of a generation on {count(num_workers, kind_of_device(backend))}, which do "
                f"not divide into batches of {at_once} rows here. Set {number_setting(backend)} to a number that divides {rows}, or set "
                "another per_device_train_batch_size."
            )
        args.generation_batch_size, args.steps_per_generation = rows, rows // at_once

    def _keep_texts_of_generation(self) -> None:
        """Have upstream keep the texts of one generation for its tables, of as many rows as it has here."""
        rows = self.generation_rows
        self._logs |= {name: deque(maxlen=rows) for name, kept in self._logs.items() if isinstance(kept, deque)}

    def _split_again(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]] | None:
        """
        The batches of a generation, in as many as this run takes, and of these the rows of this process. `None` where there are
        none, or of another number of rows: upstream generates anew then.
        """
        parts: dict[str, list[torch.Tensor]] = {}
        for name in sorted(tensors, key=lambda name: int(name.partition(".")[0])):
            parts.setdefault(name.partition(".")[2], []).append(tensors[name])
        num_batches, rows, processes = self.generation_batches, self.generation_rows, self.backend.processes
        batches: list[dict[str, torch.Tensor]] = [{} for _ in range(num_batches)]
        for key, of_key in parts.items():
            # A number of the whole generation is in all of them.
            whole = torch.cat(of_key) if of_key[0].ndim else of_key[0]
            if whole.ndim and len(whole) != rows:
                return None
            if not self.backend.static_shapes:
                # Where batches are padded, they wait on the host.
                whole = whole.to(self.args.device)
            for batch, value in zip(
                batches, whole.chunk(num_batches) if whole.ndim else [whole] * num_batches, strict=True
            ):
                batch[key] = value.chunk(processes.row_shards)[processes.row_shard] if value.ndim else value
        for batch in batches:
            for key in [key for key in batch if key.endswith(_COLUMNS)]:
                columns, name = int(batch.pop(key).max()), key.removesuffix(_COLUMNS)
                batch[name] = batch[name][:, -columns:] if name in OF_PROMPTS else batch[name][:, :columns]
        return batches if parts else None
