"""What the trainers that generate their own data cannot do in programs of static shape is refused before a model is loaded."""

from collections.abc import Mapping
from typing import Any

import datasets
from transformers import ProcessorMixin
from transformers.utils import logging

from ...errors import UserError
from ..checks.datasets import named_datasets


logger = logging.get_logger(__name__)

# Settings, and what to type instead.
_SETTINGS = {
    "use_vllm": "vLLM cannot be given the weights of a model that trains on XLA. Set use_vllm=False: completions are generated "
    "by compiled programs, with the weights in place.",
    "use_transformers_paged": "its pages have other shapes at every call, each of which compiles. Set "
    "use_transformers_paged=False: completions are generated with a static cache.",
    "use_transformers_continuous_batching": "its batches have other shapes at every call, each of which compiles. Set "
    "use_transformers_continuous_batching=False: completions are generated with a static cache.",
}
_TOOLS = (
    "conversations with tools have other lengths at every turn, each of which compiles. Leave it out, and train on prompts, "
    "or use a rollout_func that runs the whole conversation."
)
_ARGUMENTS = {"tools": _TOOLS, "environment_factory": _TOOLS}


def check_rollouts(given: Mapping[str, Any], upstream: str) -> None:
    """
    Check what a trainer that generates its own data was given.

    Args:
        given (`Mapping[str, Any]`):
            What it was given, by name.
        upstream (`str`):
            Its name at upstream.

    Raises:
        `ValueError`: Something does not work on XLA. The message says what to set instead.
    """
    settings = vars(given["args"])
    for name, why in _SETTINGS.items():
        if settings.get(name):
            raise UserError(f"{name}=True does not work on XLA: {why}")
    for name, why in _ARGUMENTS.items():
        if given.get(name):
            raise UserError(f"{name} does not work on XLA: {why}")
    if isinstance(given.get("processing_class"), ProcessorMixin):
        raise UserError(
            f"processing_class is a {type(given['processing_class']).__name__}, which prepares images. {upstream} trains on text "
            "on XLA. Pass its tokenizer: processing_class=processor.tokenizer."
        )
    if settings.get("cache_implementation") not in (None, "static"):
        logger.warning(
            f"cache_implementation={settings['cache_implementation']!r} has no effect on XLA, where the cache is static."
        )
    for name, dataset in named_datasets(given.get("train_dataset"), given.get("eval_dataset")).items():
        _check_prompts(dataset, name, upstream)


def _check_prompts(dataset, name: str, upstream: str) -> None:
    if not isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)):
        return
    columns = dataset.column_names
    if columns and "prompt" not in columns:
        raise UserError(
            f"{name} has the columns {columns}, and {upstream} needs 'prompt': a text, or messages that end with the user's. "
            f"Rename a column: dataset.rename_column({columns[0]!r}, 'prompt')."
        )
