"""What an export changed: its logits, or the preferences of a reward model, beside those of the trained model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


#: Asked where no prompts are given.
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "37+85?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Tom has 3 boxes of 12 eggs and uses 7 eggs. How many are left? Explain each step.",
)
#: What a reward model chooses among after each prompt.
ANSWERS = (
    "I do not know.",
    "Paris, which is known for the Eiffel Tower.",
    "Step by step: 7+5=12, write 2 carry 1; 3+8+1=12; so it is 122.",
    "def total(numbers):\n    return sum(numbers)",
)
# Tokens that the trained model goes on with after each prompt, so that what it says is compared, too.
_ANSWER_TOKENS = 16
# Mean Kullback-Leibler divergence, in nats. Up to the first it is the order of summation of float32; a model that rounds
# more than the second away answers differently now and then.
_SAME = 1e-6
_MUCH = 1e-2
# Where activations are rounded, this takes the place of the first: one that lies between two integers goes by the last bit of a sum.
_SAME_BUT_FOR_TIES = 1e-4
# A change that is a larger share than this of what training itself changed is much.
_MUCH_OF_TRAINING = 0.1


@dataclass(frozen=True)
class Difference:
    """
    Logits of a model beside those of the trained one, over all positions of all prompts. The logits of a reward model
    are its scores of two answers to a prompt, for every two: their softmax is how often it prefers which.

    Args:
        max_abs (`float`): Largest absolute difference of two logits, or scores.
        mean_kl (`float`): Mean Kullback-Leibler divergence from the trained model, in nats.
        same_top1 (`float`): Share of the positions with the same first choice.
    """

    max_abs: float
    mean_kl: float
    same_top1: float


def tokenize(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str | None = None) -> torch.Tensor:
    """Tokenize a prompt, for an answer to follow, or with one, to a shape `(1, length)`: as turns where there is a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt if answer is None else f"{prompt} {answer}", return_tensors="pt").input_ids
    turns = [{"role": "user", "content": prompt}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=answer is None, return_dict=True, return_tensors="pt"
    )["input_ids"]


class Proof:
    """
    What a trained model computes after some prompts, for others to be set beside it: the logits, of shapes `(length, vocabulary)`, of a
    prompt and what the model goes on with by its first choices; or with `rewards` its scores, of shapes `(pairs, 2)`, for every two
    of the [`ANSWERS`] to a prompt. All are in float32.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str],
        rewards: bool,
    ):
        self.rewards, self.num_prompts = rewards, len(prompts)
        # For each prompt, its rows of tokens, of shape `(1, length)`.
        self._rows = [
            [tokenize(tokenizer, prompt, answer) for answer in (ANSWERS if rewards else [None])] for prompt in prompts
        ]
        if not rewards:
            # The model's own settings may sample.
            settings = GenerationConfig(
                max_new_tokens=_ANSWER_TOKENS,
                do_sample=False,
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=0,
            )
            for row in self._rows:
                mask = torch.ones_like(row[0])
                row[0] = model.generate(input_ids=row[0], attention_mask=mask, generation_config=settings)
        #: The values of the trained model.
        self.values = self.measure(model)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> list[torch.Tensor]:
        """The values of another model, for each prompt."""
        values = ([model(input_ids=ids, use_cache=False).logits[0].float() for ids in row] for row in self._rows)
        return [torch.combinations(torch.cat(scores)) if self.rewards else scores[0] for scores in values]

    def compare(self, values: list[torch.Tensor]) -> Difference:
        """Set values of another model beside those of the trained one, but for tokens that only one of the two has."""
        size = min(self.values[0].shape[-1], values[0].shape[-1])
        pairs = [(mine[:, :size], yours[:, :size]) for mine, yours in zip(self.values, values, strict=True)]
        positions = sum(mine.shape[0] for mine, _ in pairs)
        kl = sum(
            nn.functional.kl_div(yours.log_softmax(-1), mine.log_softmax(-1), reduction="sum", log_target=True)
            for mine, yours in pairs
        )
        return Difference(
            # The largest is found among tensors, where a NaN stays one.
            max_abs=torch.stack([(mine - yours).abs().max() for mine, yours in pairs]).max().item(),
            # Rounding may leave it slightly below.
            mean_kl=(kl / positions).clamp(min=0).item(),
            same_top1=sum((mine.argmax(-1) == yours.argmax(-1)).sum() for mine, yours in pairs).item() / positions,
        )


def judge(
    dtype: str,
    difference: Difference,
    training: Difference | None,
    rounded_to: str | None = None,
    rounds_activations: bool = False,
) -> tuple[bool, str]:
    """
    Say whether an export with weights of a dtype, and those of linear layers `rounded_to` integers that they were not
    trained for, may be used in place of the trained model, and why, from what it changed and from what training changed,
    where the base is known. Both may round activations.
    """
    if training is not None and training.max_abs == 0:
        return False, (
            "The adapter changes nothing after these prompts: it was not trained, its weights have names that the base does not "
            "know, or it trains tokens that no prompt has. In the last case, give prompts that have them: --prompts TEXT"
        )
    if difference.mean_kl <= _SAME:
        return (
            True,
            "The exported model is the trained one: they differ no more than float32 sums in another order do.",
        )
    if rounds_activations and difference.mean_kl <= _SAME_BUT_FOR_TIES:
        return (
            True,
            "The exported model is the trained one: sums of float32 in another order have rounded some activations to the next "
            "integer.",
        )
    if dtype == "float32" and rounded_to is None:
        return False, "The exported model is not the trained one. Do not use it, and use the adapter on its base."
    of_training = difference.mean_kl / max(training.mean_kl, _SAME) if training is not None else 0.0
    share = f", {of_training:.2g} of what training changed" if training is not None else ""
    what = f"Rounding to {rounded_to or dtype} changes the model by {difference.mean_kl:.2g} nats{share}"
    # The other way round, a NaN would pass.
    if difference.mean_kl <= _MUCH and of_training <= _MUCH_OF_TRAINING:
        return True, f"{what}: little."
    if rounded_to is not None:
        return False, f"{what}: much. Train with qat_weight_dtype, or export more bits: --quantize int8."
    return False, f"{what}: much. Export with --dtype float32, or keep the adapter beside its base."
