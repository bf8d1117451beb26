"""A reference that follows the policy (`sync_ref_model`), layer by layer, and that is kept in checkpoints."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.utils import logging
from trl.trainer.callbacks import SyncRefModelCallback

from ...sharding import ShardingPlan
from ..checks.upstream import upstream_names
from .layers import LayerScan


logger = logging.get_logger(__name__)

_REFERENCE_FILE = "reference.safetensors"


class _SyncOneByOne(SyncRefModelCallback):
    """Upstream's, which pairs the parameters of two models: those of the policy have to be of single layers, too."""

    def __init__(self, layers: LayerScan, ref_model: nn.Module, accelerator: Any):
        super().__init__(ref_model=ref_model, accelerator=accelerator)
        self._layers = layers

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.ref_model_sync_steps == 0:
            with self._layers.one_by_one():
                super().on_step_end(args, state, control, **kwargs)


class SyncedReferenceMixin:
    """
    The part of [`TPUDPOTrainer`] and [`TPUKTOTrainer`] that synchronizes the reference with the policy (`sync_ref_model`),
    also where the policy's layers run as one loop, and that saves and resumes it, on every backend.

    Upstream does not save it: a run that it resumes begins again with the reference model as it was given.
    """

    def _set_up(self, arguments) -> None:
        with upstream_names(type(self), SyncRefModelCallback=self._make_sync):
            super()._set_up(arguments)

    def _make_sync(self, SyncRefModelCallback: type, **kwargs) -> _SyncOneByOne:
        return _SyncOneByOne(self.layers, **kwargs)

    @property
    def _synced_reference(self) -> nn.Module | None:
        # Parts of one that accelerate has split over processes are not put together here.
        split = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return self.ref_model if self.args.sync_ref_model and not split else None

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._synced_reference is None or not (self.args.should_save or self._is_for_first_host):
            return
        with self.layers.one_by_one():
            weights = self.backend.fetch(dict(self._synced_reference.named_parameters()))
        if self.args.should_save:
            weights = {name: weight.detach().contiguous() for name, weight in weights.items()}
            save_file(weights, Path(output_dir) / _REFERENCE_FILE)

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        checkpoint = super()._find_checkpoint(resume_from_checkpoint)
        if checkpoint is not None and self.args.sync_ref_model:
            self._load_reference(Path(checkpoint) / _REFERENCE_FILE)
        return checkpoint

    def _load_reference(self, path: Path) -> None:
        reference = self._synced_reference
        if reference is None or not path.is_file():
            logger.warning(
                f"{path.parent} is resumed without the reference that sync_ref_model had reached, which "
                f"{'is not saved with FSDP or DeepSpeed' if reference is None else 'is not in it'}: the run goes on "
                "with the reference model as it was given, and is not the run that was never stopped."
            )
            return
        weights = load_file(path)
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(weights[name])
        ShardingPlan(reference, self.chips.mesh).apply(reference, self.backend)
