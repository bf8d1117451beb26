"""The trainers and their configs."""

# The backend is chosen before transformers and trl are imported: they fix what they do about torch_xla on import.
from ..backends.selection import choose_before_upstream


choose_before_upstream()

from ..callbacks.preemption import TrainingPreempted  # noqa: E402
from .configs import ExtensionArguments, TPUSeq2SeqTrainingArguments, TPUSFTConfig, TPUTrainingArguments  # noqa: E402
from .mixin import TPUTrainerMixin  # noqa: E402
from .online.distillation import TPUDistillationConfig, TPUDistillationTrainer  # noqa: E402
from .online.grpo import TPUGRPOConfig, TPUGRPOTrainer  # noqa: E402
from .online.rloo import TPURLOOConfig, TPURLOOTrainer  # noqa: E402
from .preference.dpo import TPUDPOConfig, TPUDPOTrainer  # noqa: E402
from .preference.kto import TPUKTOConfig, TPUKTOTrainer  # noqa: E402
from .preference.reward import TPURewardConfig, TPURewardTrainer  # noqa: E402
from .sft.trainer import TPUSFTTrainer  # noqa: E402
from .trainer import TPUSeq2SeqTrainer, TPUTrainer  # noqa: E402


__all__ = [
    "ExtensionArguments",
    "TPUDPOConfig",
    "TPUDPOTrainer",
    "TPUDistillationConfig",
    "TPUDistillationTrainer",
    "TPUGRPOConfig",
    "TPUGRPOTrainer",
    "TPUKTOConfig",
    "TPUKTOTrainer",
    "TPURLOOConfig",
    "TPURLOOTrainer",
    "TPURewardConfig",
    "TPURewardTrainer",
    "TPUSFTConfig",
    "TPUSFTTrainer",
    "TPUSeq2SeqTrainer",
    "TPUSeq2SeqTrainingArguments",
    "TPUTrainer",
    "TPUTrainerMixin",
    "TPUTrainingArguments",
    "TrainingPreempted",
]
