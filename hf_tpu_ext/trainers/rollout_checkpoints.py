"""Completions in checkpoints: a run that is resumed goes on with those that it was trained on."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


_FILE = "rollouts.safetensors"
_STEP = "step"


class RolloutCheckpoints:
    """
    The part of [`RolloutMixin`] that saves and resumes the batches of a generation, of which some steps are still to come.

    Upstream saves none of it: a run that it resumes generates anew, and takes other slices of what it has generated.
    """

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if not self.args.should_save:
            return
        tensors = {_STEP: torch.tensor(self._step)}
        if self._step % (self.args.steps_per_generation * self.num_iterations):
            for index, batch in enumerate(self._buffered_inputs):
                # Slices, of which a number may be in all of them.
                tensors |= {f"{index}.{key}": value.clone() for key, value in batch.items() if value is not None}
        save_file(tensors, Path(output_dir) / _FILE)

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        checkpoint = super()._find_checkpoint(resume_from_checkpoint)
        if checkpoint is not None and (Path(checkpoint) / _FILE).is_file():
            self._load_rollouts(Path(checkpoint) / _FILE)
        return checkpoint

    def _load_rollouts(self, path: Path) -> None:
        tensors = load_file(path)
        self._step = int(tensors.pop(_STEP))
        batches: list[dict[str, torch.Tensor]] = [{} for _ in range(self.args.steps_per_generation)]
        rows = set()
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            if int(index) < len(batches):
                # Where batches are padded, they wait on the host.
                batches[int(index)][key] = tensor if self.backend.static_shapes else tensor.to(self.args.device)
            rows.add(len(tensor) if tensor.ndim else self._train_batch_size)
        # Of other batches than this run's, upstream generates anew.
        fits = all(batches) and rows == {self._train_batch_size}
        self._buffered_inputs = batches if fits else None
