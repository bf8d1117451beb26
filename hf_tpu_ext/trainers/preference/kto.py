"""Kahneman-Tversky optimization."""

from dataclasses import dataclass

from trl import KTOConfig, KTOTrainer

from ..checks.preferences import PreferenceData
from ..configs import ExtensionArguments, ImageArguments
from ..mixin import TPUTrainerMixin
from ..run.synced_reference import SyncedReferenceMixin
from .reference_log_probs import ReferenceLogProbsMixin


@dataclass
class TPUKTOConfig(ImageArguments, ExtensionArguments, KTOConfig):
    """[`~trl.KTOConfig`] with the settings of [`ExtensionArguments`] and [`ImageArguments`]."""


class TPUKTOTrainer(PreferenceData, ReferenceLogProbsMixin, SyncedReferenceMixin, TPUTrainerMixin, KTOTrainer):
    """
    [`~trl.KTOTrainer`] (https://huggingface.co/papers/2402.01306) that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~trl.KTOTrainer`] takes, a plain [`~trl.KTOConfig`] included, and logs the same metrics.

    The reference, and the mismatched completions that the KL term is estimated from, run inside the step's graph.

    Example:

    ```python
    >>> from hf_tpu_ext import TPUKTOTrainer as KTOTrainer
    >>> from datasets import load_dataset

    >>> trainer = KTOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train"),
    ... )
    >>> trainer.train()
    ```
    """

    _config_name = TPUKTOConfig.__name__
    reference_columns = ("ref_logps", "ref_KL_logps")

    @property
    def _runs_other_passes(self) -> bool:
        return self.calculate_KL or super()._runs_other_passes
