"""Whether layers read a prompt once for all completions of it that are in a batch."""

from collections.abc import Callable
from typing import Any

from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model

from ...layers.attention import takes_shared_prompts
from ...layers.random_numbers import draws_random_numbers
from ..run.layers import VERIFIED
from .arguments import RewardedArguments


def sharing_setting(args: TrainingArguments) -> str:
    """What `share_prompts` is: `"auto"` in upstream's own arguments."""
    return args.share_prompts if isinstance(args, RewardedArguments) else RewardedArguments.share_prompts


def why_not_shared(model: nn.Module, setting: str) -> str | None:
    """Why a model is to read a prompt once for each of its completions, as a clause; `setting` is `share_prompts`."""
    base = unwrap_peft_model(model)
    # Beside attention, each token is computed by itself, with its position.
    if not isinstance(base, PreTrainedModel) or base.config.get_text_config().model_type not in VERIFIED:
        return f"{type(base).__name__} may compute with other tokens than those that attention sees"
    if not takes_shared_prompts(base):
        return f"the attention of {type(base).__name__} is its own"
    if isinstance(model, PeftModel):
        for config in model.peft_config.values():
            if type(config) is not LoraConfig or config.alora_invocation_tokens:
                return f"an adapter of type {type(config).__name__} may be another at each token"
    if setting == "auto" and (random := draws_random_numbers(model)) is not None:
        return f"with {random} each has other random numbers (share_prompts=on has the same for all completions of a prompt)"
    return None


def leave_in_order(batch: dict[str, Any], shuffle_sequence_dict: Callable) -> dict[str, Any]:
    """In place of upstream's shuffle of a generation that is one batch: as many random numbers are drawn."""
    shuffle_sequence_dict(batch)
    return batch


def shuffle_groups(group: int, batch: dict[str, Any], shuffle_sequence_dict: Callable) -> dict[str, Any]:
    """Upstream's shuffle of the rows of a generation, by which each `group` of them stays together."""
    is_of_rows = {key: isinstance(value, Tensor) and value.ndim > 0 for key, value in batch.items()}
    groups = {key: value.unflatten(0, (-1, group)) if is_of_rows[key] else value for key, value in batch.items()}
    return {
        key: value.flatten(0, 1) if is_of_rows[key] else value for key, value in shuffle_sequence_dict(groups).items()
    }
