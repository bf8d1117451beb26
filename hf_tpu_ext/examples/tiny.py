"""A tiny model and synthetic tasks that it learns in seconds, for tests, benchmarks and smoke runs. All of it deterministic."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ..errors import UserError
from .jsonl import write_splits


PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML. The generation markers tell TRL's `assistant_only_loss` which tokens the assistant says.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # The usual 0.02 suits widths of a thousand and more; a model this narrow learns several times slower from it.
    "initializer_range": 0.1,
}
# What a family needs besides, because its default is of the size of its real model.
FAMILIES = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def make_tokenizer(output_dir: str | Path) -> Path:
    """
    Make a byte-level tokenizer of 259 tokens: any text is encodable, one token a byte, every digit its own token.

    It has a ChatML template, ends a turn with `<|im_end|>` (its end-of-sequence token) and pads with `<|endoftext|>`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=SIZES["max_position_embeddings"],
    )
    fast.save_pretrained(output_dir)
    return Path(output_dir)


def make_model(output_dir: str | Path, model_type: str = "qwen3", seed: int = 0, **overrides) -> Path:
    """
    Make a randomly initialised float32 model of two layers and hidden size 64, of one of [`FAMILIES`], together with
    its tokenizer ([`make_tokenizer`]), in a directory that `from_pretrained` loads. `overrides` are fields of the
    family's configuration, for instance `num_hidden_layers=4` or `tie_word_embeddings=True`.
    """
    if model_type not in FAMILIES:
        raise UserError(f"model_type={model_type!r} is not a tiny model family. Choose one of: {', '.join(FAMILIES)}.")
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(output_dir))
    tokens = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(model_type, **{**SIZES, **tokens, **FAMILIES[model_type], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(output_dir)
    return Path(output_dir)


def make_arithmetic(output_dir: str | Path, num_rows: int = 2048, seed: int = 0) -> Path:
    """
    Write additions worked digit by digit, of one to three digits, in TRL's conversational prompt-completion form.

    `37+85?` is answered by `7+5=12, write 2 carry 1; 3+8+1=12; 122`. A tiny model learns it because every digit of the
    answer depends on a few characters only. No addition occurs in both splits; the test split has every eighth.
    """
    rows = [
        {"prompt": _says("user", f"{a}+{b}?"), "completion": _says("assistant", work_addition(a, b))}
        for a, b in _draw_additions(num_rows, random.Random(seed))
    ]
    return _write(output_dir, rows)


def make_preferences(output_dir: str | Path, num_rows: int = 1024, seed: int = 0, paired: bool = True) -> Path:
    """
    Write additions with a right and a wrong answer, in TRL's conversational preference form with an explicit prompt. The
    chosen answer is that of [`make_arithmetic`]; the rejected one works out another addition of as many digits. Without
    `paired`, right and wrong answers take turns as rows with a `label`.
    """
    rng = random.Random(seed)
    rows = []
    for number, (a, b) in enumerate(_draw_additions(num_rows, rng)):
        low, high = 10 ** (len(str(a)) - 1), 10 ** len(str(a)) - 1
        wrong = a
        while wrong == a:
            wrong = rng.randint(low, high)
        chosen, rejected = (_says("assistant", work_addition(first, b)) for first in (a, wrong))
        row = {"prompt": _says("user", f"{a}+{b}?")}
        if paired:
            row |= {"chosen": chosen, "rejected": rejected}
        else:
            # Right and wrong take turns within both splits.
            is_right = (number + number // 8) % 2 == 0
            row |= {"completion": chosen if is_right else rejected, "label": is_right}
        rows.append(row)
    return _write(output_dir, rows)


def make_questions(output_dir: str | Path, num_rows: int = 1024, seed: int = 0) -> Path:
    """
    Write additions to be answered, in TRL's conversational prompt form, with the working and the sum as `solution`, for
    trainers that generate completions and reward them.
    """
    rows = [
        {"prompt": _says("user", f"{a}+{b}?"), "solution": work_addition(a, b)}
        for a, b in _draw_additions(num_rows, random.Random(seed))
    ]
    return _write(output_dir, rows)


def _says(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _draw_additions(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Different additions. Insertion order of a dict, unlike that of a set, is the same in every process."""
    additions: dict[tuple[int, int], None] = {}
    while len(additions) < count:
        digits = rng.randint(1, 3)
        low, high = 10 ** (digits - 1), 10**digits - 1
        additions[rng.randint(low, high), rng.randint(low, high)] = None
    return list(additions)


def work_addition(a: int, b: int) -> str:
    """Add two numbers of equally many digits in writing: the steps from the last digit to the first, and the sum."""
    steps, carry = [], 0
    pairs = list(zip(reversed(str(a)), reversed(str(b)), strict=True))
    for place, (x, y) in enumerate(pairs):
        total = int(x) + int(y) + carry
        step = f"{x}+{y}+{carry}={total}" if carry else f"{x}+{y}={total}"
        carry = total // 10
        if place < len(pairs) - 1:
            step += f", write {total % 10}" + (f" carry {carry}" if carry else "")
        steps.append(step)
    return "; ".join([*steps, str(a + b)])


def _write(output_dir: str | Path, rows: list[dict]) -> Path:
    train = [row for index, row in enumerate(rows) if index % 8]
    return write_splits(output_dir, {"train": train, "test": rows[::8]})
