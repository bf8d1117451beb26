"""Answers before and after training, side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback


class ShowSamples(TrainerCallback):
    """
    Answers prompts of the evaluation set before and after training, and prints both beside the reference. Where a run is resumed, the
    first answer is that of its checkpoint, and says so.

    Rows are prepared ones with `input_ids` and `labels`, whose prompt is what comes before the first label; of a conversation that
    is trained on as a whole, what comes before its last message. `generate` makes the tokens of answers of those of prompts, at
    most `max_new_tokens`. `keep` is given the texts of each row.
    """

    #: Tokens of an answer.
    max_new_tokens = 32

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rows: list[dict[str, Any]],
        generate: Callable[[list[list[int]]], list[list[int]]],
        keep: Callable[[Sequence[Mapping[str, str]]], None] | None = None,
    ):
        self._tokenizer = tokenizer
        self._generate = generate
        self._keep = keep
        self._prompts, self._references = [], []
        for row in rows:
            start = next(index for index, label in enumerate(row["labels"]) if label != -100)
            start = start if start > 1 else self._start_of_answer(row)
            self._prompts.append(row["input_ids"][:start])
            self._references.append(row["input_ids"][start:])
        self._before: list[str] = []
        self._when = "before"

    def _start_of_answer(self, row: Mapping[str, Any]) -> int:
        ids, messages = row["input_ids"], row.get("messages") or []
        if len(messages) > 1:
            prompt = self._tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            if ids[: len(prompt)] == prompt and len(prompt) < len(ids):
                return len(prompt)
        # Text has no prompt of its own, nor has a row whose end was cut off.
        return max(1, len(ids) // 2)

    def on_train_begin(self, args, state, control, **kwargs):
        self._before = self._answer()
        self._when = f"at step {state.global_step}" if state.global_step else "before"

    def on_train_end(self, args, state, control, **kwargs):
        after = self._answer()
        if not state.is_world_process_zero:
            return
        samples = []
        for prompt, reference, old, new in zip(self._prompts, self._references, self._before, after, strict=True):
            text = self._tokenizer.decode(prompt, skip_special_tokens=True).strip()
            answers = {"reference": self._text(reference), self._when: old, "after": new}
            samples.append({"prompt": text, **answers})
            tqdm.write(f"\n{text}")
            for name, answer in answers.items():
                tqdm.write(f"  {name:>9}: {answer}")
        tqdm.write("")
        if self._keep is not None:
            self._keep(samples)

    def _answer(self) -> list[str]:
        return [self._text(answer) for answer in self._generate(self._prompts)]

    def _text(self, token_ids: list[int]) -> str:
        eos_token_id = self._tokenizer.eos_token_id
        if eos_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(eos_token_id)]
        return " ".join(self._tokenizer.decode(token_ids, skip_special_tokens=True).split())
