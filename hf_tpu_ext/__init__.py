"""Run Hugging Face Trainer and TRL recipes on TPU, GPU and CPU with one import changed."""

from importlib import import_module
from typing import TYPE_CHECKING

from .importing import without_garbage_collection


if TYPE_CHECKING:
    from .errors import SaveError, UserError
    from .generation import generate
    from .trainers import (
        TPUDistillationConfig,
        TPUDistillationTrainer,
        TPUDPOConfig,
        TPUDPOTrainer,
        TPUGRPOConfig,
        TPUGRPOTrainer,
        TPUKTOConfig,
        TPUKTOTrainer,
        TPURewardConfig,
        TPURewardTrainer,
        TPURLOOConfig,
        TPURLOOTrainer,
        TPUSeq2SeqTrainer,
        TPUSeq2SeqTrainingArguments,
        TPUSFTConfig,
        TPUSFTTrainer,
        TPUTrainer,
        TPUTrainingArguments,
        TrainingPreempted,
    )

__version__ = "0.1.0"
__all__ = [
    "SaveError",
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
    "TPUTrainingArguments",
    "TrainingPreempted",
    "UserError",
    "generate",
]


def __getattr__(name: str):
    # The backend has to be chosen before transformers and accelerate are imported, and PyTorch's autoload imports this
    # package in every process that imports torch: so nothing is imported until a trainer is asked for.
    if name in ("SaveError", "UserError"):
        return getattr(import_module(".errors", __name__), name)
    if name in __all__:
        with without_garbage_collection():
            return getattr(import_module(".generation" if name == "generate" else ".trainers", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
