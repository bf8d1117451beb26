"""What the models of an auto class are trained on, and which of them are tried."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny_configs import VOCABULARY
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import getattribute_from_module
from transformers.models.auto.configuration_auto import model_type_to_module_name


LONGEST = 16
#: Of a text model, from the one that people use most.
SFT_RECIPES = ("sft", "sft without checkpointing", "trainer")


@dataclass(frozen=True)
class Task:
    """
    Args:
        auto (`str`):
            The auto class.
        mapping (`str`):
            The name of its models in upstream's `modeling_auto`.
        peft (`str` or `None`):
            PEFT's name of the task.
        collator (`str`):
            Upstream's collator.
        labels (`Callable`):
            What is to be learned of a row of tokens, where it is not the row itself.
        recipes (`tuple`):
            The recipes, of which the first that upstream trains counts.
        heads (`tuple`):
            What PEFT trains in full by itself, and refuses to adapt.
    """

    auto: str
    mapping: str
    peft: str
    collator: str
    labels: Callable[[list[int]], Any] = lambda row: row
    recipes: tuple[str, ...] = ("trainer",)
    heads: tuple[str, ...] = ()


TASKS = {
    "causal": Task("AutoModelForCausalLM", "CAUSAL_LM", "CAUSAL_LM", "DataCollatorForSeq2Seq", recipes=SFT_RECIPES),
    "image_text": Task(
        "AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "DataCollatorForSeq2Seq", recipes=SFT_RECIPES
    ),
    "seq2seq": Task(
        "AutoModelForSeq2SeqLM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SEQ_2_SEQ_LM",
        "DataCollatorForSeq2Seq",
        lambda row: [*row[:-6:-1], 2],
    ),
    "sequence": Task(
        "AutoModelForSequenceClassification",
        "SEQUENCE_CLASSIFICATION",
        "SEQ_CLS",
        "DataCollatorWithPadding",
        lambda row: row[0] % 3,
    ),
    "token": Task(
        "AutoModelForTokenClassification",
        "TOKEN_CLASSIFICATION",
        "TOKEN_CLS",
        "DataCollatorForTokenClassification",
        lambda row: [token % 3 for token in row],
        heads=("classifier", "score"),
    ),
}


def names_of(task: str) -> list[str]:
    """
    The families to try: of text models all; of other auto classes those whose `forward` is their own, and one of those that share a
    head. To classify tokens takes the body of a model that classifies rows: only others are tried, and two examples.
    """
    mapping: dict[str, str] = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task].mapping}_MAPPING_NAMES")
    if task == "causal":
        return list(mapping)
    forwards: dict[tuple[str, str], str] = {}
    for name, cls in mapping.items():
        module = importlib.import_module(f".{model_type_to_module_name(name)}", "transformers.models")
        model = getattribute_from_module(module, cls)
        forward = inspect.unwrap((model[0] if isinstance(model, tuple) else model).forward)
        # That of Llama is as good as any, and known best.
        shared = forward.__qualname__.startswith("Generic")
        forwards.setdefault((forward.__module__, forward.__qualname__), "llama" if shared else name)
    names = list(forwards.values())
    if task == "token":
        classifiers = names_of("sequence")
        names = ["bert", "llama", *(name for name in names if name not in classifiers)]
    return names


def make_rows(task: str, has_encoder: bool, count: int) -> list[dict[str, Any]]:
    """Random tokens; those of others than text models have an end, which some look for."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, VOCABULARY - 1, (LONGEST - index % 5,), generator=generator).tolist()
        for index in range(count)
    ]
    if task not in ("causal", "image_text"):
        rows = [[*row[:-1], 2] for row in rows]
    # The mapping of Seq2Seq models has those for speech, too, which continue a row.
    labels = TASKS["causal" if task == "seq2seq" and not has_encoder else task].labels
    return [{"input_ids": row, "labels": labels(row), "attention_mask": [1] * len(row)} for row in rows]


def make_collator(task: str, tokenizer: Any) -> Any:
    """Upstream's collator of a task."""
    return getattr(transformers, TASKS[task].collator)(tokenizer)
