"""A real teacher, a student damaged by rounding its weights, and real text: what the distillation benchmarks share."""

import argparse
import os
import re
import sys
from pathlib import Path

import torch
from datasets import DatasetDict, load_dataset
from torch import Tensor, nn
from transformers import PreTrainedModel


ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "distillation.md"
sys.path.insert(0, str(ROOT / "recipes"))

from prepare_quickstart import make_docstrings, prepare_model  # noqa: E402


def round_group_wise(weight: Tensor, bits: int, group_size: int) -> Tensor:
    """
    Round a weight to few bits: symmetric, to nearest, with one scale for each group of inputs.

    Args:
        weight (`torch.Tensor` of shape `(outputs, inputs)`):
            Weight of a linear layer.
        bits (`int`):
            Bits of an entry. Those of a group are multiples of its largest magnitude over `2**(bits - 1) - 1`.
        group_size (`int`):
            Inputs of a group.

    Returns:
        `torch.Tensor` of shape `(outputs, inputs)`: The values that the rounded weight stands for.

    Raises:
        ValueError: If the inputs are not a multiple of `group_size`.
    """
    outputs, inputs = weight.shape
    if inputs % group_size:
        raise ValueError(f"{inputs} inputs cannot be split into groups of {group_size}.")
    groups = weight.reshape(outputs, inputs // group_size, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    # A group of zeros stays one.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return ((groups / scales).round() * scales).reshape(outputs, inputs)


@torch.no_grad()
def damage(model: PreTrainedModel, bits: int, group_size: int) -> None:
    """Round the weights of all linear layers but the head, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            module.weight.copy_(round_group_wise(module.weight, bits, group_size))


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add what [`prepare`] needs to a command line, and the size of groups."""
    where = "made there when it is absent, as `make quickstart` makes it"
    parser.add_argument(
        "--model_dir", type=Path, default=Path(".cache/quickstart/model"), help=f"SmolLM2-135M-Instruct; {where}"
    )
    parser.add_argument(
        "--data_dir", type=Path, default=Path(".cache/quickstart/data"), help=f"functions and docstrings; {where}"
    )
    parser.add_argument("--group_size", type=int, default=32, help="inputs that share a scale (default: 32)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what [`prepare`] and [`damage`] need to a command line."""
    add_sources(parser)
    parser.add_argument("--bits", type=int, default=3, help="bits of a rounded weight (default: 3)")


def prepare(arguments: argparse.Namespace) -> DatasetDict:
    """Make sure that model and data are there."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    prepare_model(arguments.model_dir)
    if not (arguments.data_dir / "train.jsonl").exists():
        make_docstrings(arguments.data_dir)
    data = load_dataset(str(arguments.data_dir))
    return data.map(to_text, remove_columns=data["train"].column_names)


def to_text(row: dict) -> dict[str, str]:
    """Join a function and its docstring to a plain text."""
    source = re.search(r"```python\n(.*)\n```", row["prompt"][0]["content"], re.DOTALL)[1]
    return {"text": f"# {row['completion'][0]['content']}\n{source}\n"}
