"""Direct preference optimization."""

from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer

from ..checks.preferences import PreferenceData
from ..configs import ExtensionArguments, ImageArguments
from ..mixin import TPUTrainerMixin
from ..run.synced_reference import SyncedReferenceMixin
from .reference_log_probs import ReferenceLogProbsMixin


@dataclass
class TPUDPOConfig(ImageArguments, ExtensionArguments, DPOConfig):
    """[`~trl.DPOConfig`] with the settings of [`ExtensionArguments`] and [`ImageArguments`]."""


class TPUDPOTrainer(PreferenceData, ReferenceLogProbsMixin, SyncedReferenceMixin, TPUTrainerMixin, DPOTrainer):
    """
    [`~trl.DPOTrainer`] (https://huggingface.co/papers/2305.18290) that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~trl.DPOTrainer`] takes, a plain [`~trl.DPOConfig`] included, and logs the same metrics.

    A pair is one example and two rows of a batch. The reference runs inside the step's graph, over the same shapes; with LoRA
    it is the policy with its adapters switched off, and needs no memory of its own.

    Example:

    ```python
    >>> from hf_tpu_ext import TPUDPOTrainer as DPOTrainer
    >>> from datasets import load_dataset

    >>> trainer = DPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
    ... )
    >>> trainer.train()
    ```
    """

    _config_name = TPUDPOConfig.__name__
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")
