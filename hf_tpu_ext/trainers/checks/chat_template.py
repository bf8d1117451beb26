"""Chat templates: messages need one to become text, and a loss on answers only one that marks them."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from ...errors import UserError
from .messages import first_row, keys_of


_GIVE_ONE = "Give one: chat_template_path='template.jinja'"
_GIVE_OR_TAKE_ONE = f"{_GIVE_ONE}, or take that of another model: chat_template_path='Qwen/Qwen3-0.6B'"
_NEEDS_MARKS = "assistant_only_loss=True needs a chat template with {% generation %} and {% endgeneration %} around what the assistant says. "
# Columns of rows that are tokens already.
_TOKENS = {"input_ids", "chosen_ids", "chosen_input_ids"}


def check_chat_template(
    dataset: Any,
    name: str,
    columns: Sequence[str],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    args: TrainingArguments,
) -> None:
    """
    Refuse messages in the `columns` of a dataset where there is no chat template for them (`ValueError`), by its first row. Messages
    call the dataset `name`.
    """
    if processing_class.chat_template is not None:
        return
    first = first_row(dataset) or {}
    with_messages = [column for column in columns if keys_of(first.get(column))]
    if with_messages and not _TOKENS & first.keys():
        fix = (
            f"{_GIVE_OR_TAKE_ONE}."
            if "chat_template_path" in vars(args)
            else "Put one into the directory of the model, as chat_template.jinja; or, in Python, give processing_class a tokenizer whose "
            "chat_template is set."
        )
        raise UserError(
            f"{with_messages[0]!r} of the {name} holds messages, and {_has_no_template(processing_class)} to make text of them. {fix}"
        )


def has_generation_markers(chat_template: Any, has_generation_markers: Callable[[Any], bool]) -> bool:
    """TRL's `has_generation_markers`, of a tokenizer without a chat template, too."""
    return chat_template is not None and has_generation_markers(chat_template)


def training_chat_template(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin, get_training_chat_template: Callable[..., str | None]
) -> str | None:
    """TRL's `get_training_chat_template`, whose refusal names no fix."""
    if processing_class.chat_template is None:
        without = _has_no_template(processing_class)
        raise UserError(f"{_NEEDS_MARKS}{without[0].upper()}{without[1:]}. {_GIVE_OR_TAKE_ONE}.")
    try:
        return get_training_chat_template(processing_class)
    except ValueError as error:
        raise UserError(
            f"{_NEEDS_MARKS}This model's has none, and TRL knows no template to put in its place. {_GIVE_ONE}; or leave "
            "assistant_only_loss out, and split the messages into columns 'prompt' and 'completion', one row for each answer: only the "
            "completion is trained on."
        ) from error


def _has_no_template(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> str:
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    name = tokenizer.name_or_path
    return f"the tokenizer{f' of {name!r}' if name else ''} has no chat template"
