"""Reward functions that are told about by row and name where they fail, and reward models that run on the device."""

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from trl.trainer.utils import is_async_callable

from ...errors import UserError
from ...formatting import format_value
from ..checks.rows import first_that_fails
from ..run.index_ranges import IndexRanges


# Arguments of a reward function that have a value for each row of a batch.
_OF_ROWS = ("prompts", "completions", "completion_ids")


def check_rewards(function: Callable, name: str) -> Callable:
    """
    Wrap a reward function of TRL, asynchronous or not, for its errors to name it and the row: it raises `ValueError` where the
    function raises, or where a reward is neither a finite number nor `None`. That there are as many as rows is left to upstream.
    """
    if is_async_callable(function):

        async def call(**kwargs):
            try:
                rewards = await function(**kwargs)
            except Exception as error:
                raise UserError(
                    _describe_error(name, error, await _find_row_async(function, kwargs), kwargs)
                ) from error
            return _check(rewards, name, kwargs)
    else:

        def call(**kwargs):
            try:
                rewards = function(**kwargs)
            except Exception as error:
                row = first_that_fails(len(kwargs["prompts"]), lambda row: function(**_one_row(kwargs, row)))
                raise UserError(_describe_error(name, error, row, kwargs)) from error
            return _check(rewards, name, kwargs)

    return call


def _one_row(kwargs: dict[str, Any], row: int) -> dict[str, Any]:
    rows = len(kwargs["prompts"])
    return {
        key: [value[row]] if key in _OF_ROWS or (isinstance(value, list) and len(value) == rows) else value
        for key, value in kwargs.items()
    }


async def _find_row_async(function: Callable, kwargs: dict[str, Any]) -> int | None:
    """As [`first_that_fails`], of rows that an asynchronous function is given by themselves."""
    for row in range(len(kwargs["prompts"])):
        try:
            await function(**_one_row(kwargs, row))
        except Exception:
            return row
    return None


def _describe_error(name: str, error: Exception, row: int | None, kwargs: dict[str, Any]) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"The reward function '{name}' raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})."
    if row is None:
        return f"{what} It does so for all {len(kwargs['prompts'])} rows together, and for none of them alone."
    return f"{what} {_describe_row(row, kwargs)} Have it return None where a row has no reward."


def _describe_row(row: int, kwargs: dict[str, Any]) -> str:
    prompt, completion = (format_value(kwargs[key][row]) for key in ("prompts", "completions"))
    return f"It was at row {row} of {len(kwargs['prompts'])}: prompt {prompt}, completion {completion}."


def _check(rewards: Any, name: str, kwargs: dict[str, Any]) -> Sequence[Any]:
    rows = len(kwargs["prompts"])
    if not isinstance(rewards, Iterable) or isinstance(rewards, (str, dict)):
        raise UserError(
            f"The reward function '{name}' returned {format_value(rewards)}, and not a list. Return one number for each of the "
            f"{rows} completions, or None where a completion has no reward."
        )
    rewards = list(rewards)
    for row, reward in enumerate(rewards[:rows]):
        try:
            is_allowed = reward is None or math.isfinite(reward)
        except (TypeError, ValueError):
            is_allowed = False
        if not is_allowed:
            raise UserError(
                f"The reward function '{name}' returned {format_value(reward)}, which is no finite number. "
                f"{_describe_row(row, kwargs)} Return a number, or None where a completion has no reward."
            )
    return rewards


class RewardsOnDevice(nn.Module):
    """
    A reward model, in the place that upstream calls it at, as a program of static shape on the device.

    Rows are padded on the right to one `length`, which doubles where a text is longer. `score` runs the model over rows of that
    length, on the host, and returns the score of each.
    """

    def __init__(self, model: PreTrainedModel, length: int, score: Callable[[dict[str, Tensor]], Tensor]):
        super().__init__()
        # In a tuple: the model is not to be one of its modules.
        self._unregistered_model = (model,)
        self._length, self._score = length, score
        model.eval()
        self._ranges = IndexRanges(
            model,
            labels=False,
            truncation="lower max_completion_length until a prompt and its completion have {} tokens at most",
            name="the reward model",
            more_rows="Pass its own tokenizer: reward_processing_classes=[...]",
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Tensor) -> SimpleNamespace:
        (model,) = self._unregistered_model
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
        self._ranges.check(batch)
        while self._length < input_ids.shape[1]:
            self._length *= 2
        missing = self._length - input_ids.shape[1]
        pads = {"input_ids": model.config.get_text_config().pad_token_id}
        batch = {key: pad(value, (0, missing), value=pads.get(key, 0)) for key, value in batch.items()}
        # Upstream is in inference mode, whose tensors no program may change.
        with torch.inference_mode(False), torch.no_grad():
            batch = {key: value.clone() for key, value in batch.items()}
            scores = self._score(batch)
        return SimpleNamespace(logits=scores[:, None])
