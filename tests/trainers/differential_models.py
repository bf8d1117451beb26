"""Models, losses and data of drawn cases."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.trainer_utils import unwrap_peft_model


ROWS, LENGTH, WORDS = 13, 10, 30
# Of the tokenizer, whose last token is the one that rows are padded with.
TOKENS = 259
FAMILIES = ("module", "causal", "sft")
PREFERENCES = ("dpo", "kto", "reward")


@dataclass(frozen=True)
class Case:
    """One training, with code of the user's."""

    seed: int
    family: str
    edits: tuple[str, ...]
    target: str
    loss: str
    tokens: bool
    batch_size: int
    accumulation: int
    weight_decay: float
    steps: int
    evaluates: bool
    ragged: bool
    #: Of preferences: fields of the config, and whether an adapter is trained.
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    lora: bool = False
    #: What the edits drew, for the message of a failure.
    drawn: list[str] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        kind = f"{self.loss} on {self.target!r}, {'tokens' if self.tokens else 'features'}"
        return (
            f"seed {self.seed}: {self.family}{f' ({kind})' if self.family == 'module' else ''}, batches of "
            f"{self.batch_size} x {self.accumulation}, {self.steps} steps, weight_decay={self.weight_decay}"
            f"{', evaluates' if self.evaluates else ''}{', ragged' if self.ragged else ''}"
            f"{', LoRA' if self.lora else ''}{f', {self.settings}' if self.settings else ''}: {'; '.join(self.drawn)}"
        )


GAIN = 1.0
LOSSES = {
    "cross-entropy": lambda x, y: nn.functional.cross_entropy(x, y),
    "mean of rows": lambda x, y: nn.functional.cross_entropy(x, y, reduction="none").mean(),
    "squared error": lambda x, y: nn.functional.mse_loss(x, nn.functional.one_hot(y, x.shape[1]).float()),
    "binary": lambda x, y: nn.functional.binary_cross_entropy_with_logits(
        x, nn.functional.one_hot(y, x.shape[1]).float()
    ),
    "contrastive": lambda x, y: nn.functional.cross_entropy(
        x @ x.roll(1, dims=1).T, torch.arange(len(x), device=x.device)
    ),
    "with penalty": lambda x, y: nn.functional.cross_entropy(x, y) + 0.1 * x.square().mean(),
}


class Settings:
    """Something that a module keeps."""

    def __init__(self):
        self.scale = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = None

    def forward(self, x):
        x = torch.tanh(self.linear(x)) + x
        return x if self.scale is None else x * self.scale


class Net(nn.Module):
    """A classifier that computes with attributes of every kind."""

    gain = 1.0

    def __init__(self, loss, tokens):
        super().__init__()
        self.first = nn.Embedding(WORDS, 8) if tokens else nn.Linear(LENGTH, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 4)
        self.loss = LOSSES[loss]
        self.settings = Settings()
        self.nested = {"a": [{"b": 1.0}]}
        self.factor = torch.ones(()).numpy()[()]
        self.shift = self.drops = self.branch = None

    def forward(self, x, labels=None, y=None, target=None):
        x = self.first(x)
        if isinstance(self.first, nn.Embedding):
            x = x.mean(1)
        for block in self.blocks:
            if self.drops is None or random.random() > self.drops:
                x = block(x)
        if self.branch is not None and self.branch(x):
            x = x * 1.5
        x = self.head(x) * (self.gain * GAIN * float(self.factor) * self.nested["a"][0]["b"])
        if self.shift is not None:
            x = x + self.shift
        if self.settings.scale is not None:
            x = x * self.settings.scale
        targets = next((value for value in (labels, y, target) if value is not None), None)
        return {"logits": x} if targets is None else {"loss": self.loss(x, targets), "logits": x}


@cache
def _transformer(auto: type = AutoModelForCausalLM, **more) -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=TOKENS, num_hidden_layers=2, max_position_embeddings=32, pad_token_id=0, **sizes
    )
    config.update(more)
    # The usual 0.02 suits widths of a thousand and more.
    config.initializer_range = 0.1
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    return auto.from_config(config, dtype=torch.float32)


def make_model(case: Case) -> nn.Module:
    if case.family == "module":
        torch.manual_seed(case.seed)
        return Net(case.loss, case.tokens)
    if case.family == "reward":
        return copy.deepcopy(_transformer(AutoModelForSequenceClassification, num_labels=1, pad_token_id=TOKENS - 1))
    return copy.deepcopy(_transformer())


def make_rows(case: Case, count: int, seed: int) -> list[dict[str, Any]]:
    rng = torch.Generator().manual_seed(1000 * case.seed + seed)

    def ids(length):
        return torch.randint(3, WORDS, (length,), generator=rng)

    if case.family == "module":
        return [
            {
                "x": ids(LENGTH) if case.tokens else torch.randn(LENGTH, generator=rng),
                case.target: torch.randint(4, (), generator=rng),
            }
            for _ in range(count)
        ]
    if case.family in PREFERENCES:
        return [_preference(case, index, ids) for index in range(count)]
    rows = [ids(LENGTH - index % 3 if case.ragged else LENGTH) for index in range(count)]
    if case.family == "sft":
        return [{"input_ids": row.tolist()} for row in rows]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def _preference(case: Case, index: int, ids: Callable[[int], torch.Tensor]) -> dict[str, Any]:
    def text(length, change):
        return "".join(chr(ord("a") + token % 26) for token in ids(length - index % change if case.ragged else length))

    prompt, chosen, rejected = text(5, 2), f"+{text(5, 3)}", f"-{text(6, 4)}"
    if case.family != "kto":
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    label = index % 3 != 0
    return {"prompt": prompt, "completion": chosen if label else rejected, "label": label}


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.blocks if isinstance(model, Net) else model.model.layers


def head_of(model: nn.Module) -> nn.Module:
    if isinstance(model, Net):
        return model.head
    return model.score if isinstance(unwrap_peft_model(model), GenericForSequenceClassification) else model.lm_head


def is_in_layer(name: str, index: int) -> bool:
    return f"blocks.{index}." in name or f"layers.{index}." in name
