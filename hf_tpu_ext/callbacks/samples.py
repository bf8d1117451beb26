"""Answers before and after training, side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..backends.base import Backend


_NEW_TOKENS = 32


@torch.no_grad()
def greedy_answers(
    model, backend: Backend, prompts: list[list[int]], max_new_tokens: int, pad_token_id: int
) -> list[list[int]]:
    """
    Continue prompts greedily, in one static shape and one program for all tokens. Returns the `max_new_tokens` token
    ids that follow each prompt.

    There is no key/value cache: each token costs a forward pass over the whole row. It is meant for a few short
    answers.
    """
    length = max(map(len, prompts)) + max_new_tokens
    rows = torch.full((len(prompts), length), pad_token_id)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    last = torch.tensor([[len(prompt) - 1] for prompt in prompts])
    state = backend.send(
        {"rows": rows, "last": last, "positions": torch.arange(length)[None], "mask": torch.ones_like(rows)}
    )
    rows, last = state["rows"], state["last"]
    for _ in tqdm(range(max_new_tokens), desc="answering", leave=False):
        logits = model(input_ids=rows, attention_mask=state["mask"], use_cache=False).logits
        scores = logits.gather(1, last[..., None].expand(-1, -1, logits.shape[-1]))
        last = last + 1
        rows = torch.where(state["positions"] == last, scores.argmax(-1), rows)
        backend.end_step()
    rows = backend.fetch(rows).tolist()
    return [row[len(prompt) : len(prompt) + max_new_tokens] for row, prompt in zip(rows, prompts, strict=True)]


class ShowSamples(TrainerCallback):
    """
    Answers prompts of the evaluation set before and after training, and prints both beside the reference.

    Rows are prepared ones with `input_ids` and `labels`, whose prompt is what comes before the first label.
    `precision` makes the context that the forward pass computes in.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        rows: list[dict[str, list[int]]],
        precision: Callable[[], AbstractContextManager],
    ):
        self._backend = backend
        self._tokenizer = tokenizer
        self._precision = precision
        self._prompts, self._references = [], []
        for row in rows:
            start = next(index for index, label in enumerate(row["labels"]) if label != -100)
            # Rows that are trained on as a whole have no prompt of their own.
            start = start if start > 1 else max(1, len(row["input_ids"]) // 2)
            self._prompts.append(row["input_ids"][:start])
            self._references.append(row["input_ids"][start:])
        self._before: list[str] = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._before = self._answer(model)

    def on_train_end(self, args, state, control, model, **kwargs):
        after = self._answer(model)
        if not state.is_world_process_zero:
            return
        for prompt, reference, old, new in zip(self._prompts, self._references, self._before, after, strict=True):
            tqdm.write("\n" + self._tokenizer.decode(prompt, skip_special_tokens=True).strip())
            for name, answer in (("reference", self._text(reference)), ("before", old), ("after", new)):
                tqdm.write(f"  {name:>9}: {answer}")
        tqdm.write("")

    def _answer(self, model) -> list[str]:
        was_training = model.training
        model.eval()
        with self._precision():
            answers = greedy_answers(model, self._backend, self._prompts, _NEW_TOKENS, self._tokenizer.pad_token_id)
        model.train(was_training)
        return [self._text(answer) for answer in answers]

    def _text(self, token_ids: list[int]) -> str:
        eos_token_id = self._tokenizer.eos_token_id
        if eos_token_id in token_ids:
            token_ids = token_ids[: token_ids.index(eos_token_id)]
        return " ".join(self._tokenizer.decode(token_ids, skip_special_tokens=True).split())
