"""Answers before and after training, side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback


class ShowSamples(TrainerCallback):
    """
    Answers prompts of the evaluation set before training and prints the answers, and after training prints both beside the reference.
    Where a run is resumed, the first answer is that of its checkpoint, and says so.

    Rows are prepared ones with `input_ids` and `labels`, whose prompt is what comes before the first label; of a conversation that
    is trained on as a whole, what comes before its last message. `generate` makes the tokens of answers of those of prompts, at
    most `max_new_tokens`. `keep` is given the texts of each row, before training and after it.
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
        self._prompts: list[list[int]] = []
        self._references: list[str] = []
        for row in rows:
            start = next(index for index, label in enumerate(row["labels"]) if label != -100)
            start = start if start > 1 else self._start_of_answer(row)
            self._prompts.append(row["input_ids"][:start])
            self._references.append(self._text(row["input_ids"][start:]))
        self._prompt_texts = [tokenizer.decode(prompt, skip_special_tokens=True).strip() for prompt in self._prompts]
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
        self._before = self.answer()
        self._when = f"at step {state.global_step}" if state.global_step else "before"
        if state.is_world_process_zero:
            self._show({self._when: self._before})

    def on_train_end(self, args, state, control, **kwargs):
        after = self.answer()
        if state.is_world_process_zero:
            self._show({"reference": self._references, self._when: self._before, "after": after})

    def answer(self) -> list[str]:
        """What the model answers now. All processes have to ask."""
        return [self._text(answer) for answer in self._generate(self._prompts)]

    def _show(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Print texts below their prompts, and hand them with the references to who keeps them: a run may be killed."""
        for row, prompt in enumerate(self._prompt_texts):
            tqdm.write(f"\n{prompt}")
            for name, of_rows in texts.items():
                tqdm.write(f"  {name:>9}: {of_rows[row]}")
        tqdm.write("")
        if self._keep is not None:
            columns = {"prompt": self._prompt_texts, "reference": self._references, **texts}
            self._keep([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def _text(self, token_ids: list[int]) -> str:
        eos_token_id = self._tokenizer.eos_token_id
        if eos_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(eos_token_id)]
        return " ".join(self._tokenizer.decode(token_ids, skip_special_tokens=True).split())
