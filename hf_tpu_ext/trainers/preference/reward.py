"""Reward modeling."""

from dataclasses import dataclass

from trl import RewardConfig, RewardTrainer

from ..checks.preferences import PreferenceData
from ..configs import ExtensionArguments
from ..mixin import TPUTrainerMixin


@dataclass
class TPURewardConfig(ExtensionArguments, RewardConfig):
    """[`~trl.RewardConfig`] with the settings of [`ExtensionArguments`]."""


class TPURewardTrainer(PreferenceData, TPUTrainerMixin, RewardTrainer):
    """
    [`~trl.RewardTrainer`] that trains on TPU, GPU and CPU with the same arguments.

    Takes everything that [`~trl.RewardTrainer`] takes, a plain [`~trl.RewardConfig`] included, and logs the same metrics.

    Example:

    ```python
    >>> from hf_tpu_ext import TPURewardTrainer as RewardTrainer
    >>> from datasets import load_dataset

    >>> trainer = RewardTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
    ... )
    >>> trainer.train()
    ```
    """

    _config_name = TPURewardConfig.__name__
