"""
What a training step's program costs to compile, and how much memory it needs besides its arguments, on XLA for the host.

    python tests/benchmarks/compile_cost.py [--write-docs]

Nothing is run: programs are traced, compiled, and read from what XLA dumps. Each is measured in a process of its own. With
`--write-docs` the tables go into docs/compile_time.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tables import versions, write_block


DOCUMENT = Path(__file__).parents[2] / "docs" / "compile_time.md"
LENGTH, ROWS = 256, 4


@dataclass(frozen=True)
class Case:
    """
    A program to compile.

    Args:
        what (`str`):
            `"head"`, the language model head alone, forward and backward; or `"step"`, a training step with AdamW.
        how (`str`):
            Of a head, `"stock"` or `"looped"`. Of a step, what `rematerialization` takes, or `"scan"`, `"scan dots"`.
        layers (`int`, *optional*, defaults to `0`):
            Layers of the model.
        hidden_size (`int`, *optional*, defaults to `64`):
            Its width.
        vocab_size (`int`, *optional*, defaults to `512`):
            Its vocabulary.
        lora (`bool`, *optional*, defaults to `False`):
            Whether adapters are trained.
        tokens (`int`, *optional*, defaults to `4096`):
            Tokens of a batch, for a head.
    """

    what: str
    how: str
    layers: int = 0
    hidden_size: int = 64
    vocab_size: int = 512
    lora: bool = False
    tokens: int = 4096


@dataclass(frozen=True)
class Cost:
    """
    What compiling took.

    Args:
        instructions (`int`):
            Instructions of the program as it was traced.
        cpu_seconds (`float`):
            Seconds of processor time that the compiler took.
        temp_bytes (`int`):
            Memory for what is neither an argument nor a result.
    """

    instructions: int
    cpu_seconds: float
    temp_bytes: int


def temp_bytes(directory: Path) -> int:
    """
    Read the memory for temporary values from XLA's report of the program compiled last.

    Args:
        directory (`Path`):
            Where XLA dumps to.

    Returns:
        `int`: Bytes.
    """
    newest = max(directory.glob("*buffer-assignment.txt"), key=lambda path: path.stat().st_mtime)
    return sum(
        map(int, re.findall(r"^allocation \d+: size (\d+), preallocated-temp", newest.read_text(), re.MULTILINE))
    )


def trace_head(backend, case: Case) -> list:
    """Trace the head: loss, and gradients of the hidden states and, without `lora`, of the head."""
    import torch
    import torch_xla.core.xla_builder as xb
    from trl.kernels import ChunkedLogProbFunction

    from hf_tpu_ext.step.looped_head import score_tokens

    score = ChunkedLogProbFunction.apply if case.how == "stock" else partial(score_tokens, backend)
    hidden = xb.create_placeholder_tensor((case.tokens, case.hidden_size), torch.float32).requires_grad_()
    weight = xb.create_placeholder_tensor((case.vocab_size, case.hidden_size), torch.float32)
    weight.requires_grad_(not case.lora)
    targets = xb.create_placeholder_tensor((case.tokens,), torch.int64)
    outputs = score(hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("entropy", "is_top1"))
    outputs[0].sum().backward()
    return [outputs[0], outputs[1], outputs[4], *(leaf.grad for leaf in (hidden, weight) if leaf.grad is not None)]


def trace_step(backend, case: Case) -> list:
    """Trace forward and backward pass and update of a Qwen3 model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hf_tpu_ext.step.activation_checkpointing import rematerialize
    from hf_tpu_ext.step.alike_layers import find_layers
    from hf_tpu_ext.step.attention import static_masks
    from hf_tpu_ext.step.kernels import use_static_kernels
    from hf_tpu_ext.step.layer_scan import LayerStack
    from hf_tpu_ext.step.looped_head import score_tokens
    from hf_tpu_ext.step.optimizer import LazyAdamW

    torch.manual_seed(0)
    width = case.hidden_size
    base = model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=case.vocab_size,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=case.layers,
            num_attention_heads=width // 16,
            num_key_value_heads=width // 32,
            head_dim=16,
            tie_word_embeddings=True,
        )
    )
    if case.lora:
        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    use_static_kernels(model)
    backend.place(model).train()
    if case.how.startswith("scan"):
        parent, name = find_layers(base)
        stack = LayerStack(parent.layers, backend, "dots" if case.how.endswith("dots") else "full")
        stack.stack()
        parent.layers = stack
    else:
        if case.how in ("full", "dots"):
            model.gradient_checkpointing_enable()
        rematerialize(model, case.how, backend)
    optimizer = LazyAdamW([weight for weight in model.parameters() if weight.requires_grad], backend, lr=1e-3)
    optimizer.create_state()
    ids = backend.send(torch.randint(0, case.vocab_size, (ROWS, LENGTH)))
    mask = backend.send(torch.ones(ROWS, LENGTH, dtype=torch.int64))
    backend.wait()
    with static_masks():
        hidden = base.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    tokens = hidden[:, :-1].reshape(-1, width)
    scores = score_tokens(backend, tokens, base.lm_head.weight, None, ids[:, 1:].reshape(-1), 1.0, 32768)
    loss = -scores[0].mean()
    loss.backward()
    optimizer.step()
    moments = [moment for state in optimizer.state.values() for moment in (state["exp_avg"], state["exp_avg_sq"])]
    return [loss.detach(), *(weight for weight in model.parameters() if weight.requires_grad), *moments]


def compile_here(case: Case, directory: Path) -> Cost:
    """
    Compile a program in this process, which dumps.

    Args:
        case ([`Case`]):
            The program.
        directory (`Path`):
            Where XLA dumps to.

    Returns:
        [`Cost`]: What it took.
    """
    import torch_xla

    from hf_tpu_ext.backends import select_backend

    backend = select_backend("xla")
    assert backend.device.type == "xla"
    results = (trace_head if case.what == "head" else trace_step)(backend, case)
    instructions = torch_xla._XLAC._get_xla_tensors_hlo(results).count(" = ")
    start = time.process_time()
    torch_xla._XLAC._xla_warm_up_cache(results, [])
    return Cost(instructions, time.process_time() - start, temp_bytes(directory))


def measure(case: Case) -> Cost:
    """
    Compile a program in a process of its own.

    Args:
        case ([`Case`]):
            The program.

    Returns:
        [`Cost`]: What it took.

    Raises:
        `RuntimeError`: The process failed. Its output is in the message.
    """
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "PJRT_DEVICE": "CPU",
            "XLA_FLAGS": f"--xla_dump_to={directory} --xla_dump_hlo_as_text",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(asdict(case)), "--directory", directory],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stdout}{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


HEADS = [
    Case("head", how, vocab_size=vocab_size, tokens=tokens, lora=True)
    for tokens, vocab_size in ((4096, 32768), (4096, 151936), (16384, 151936))
    for how in ("stock", "looped")
]
POLICIES = [Case("step", how, 8, 256) for how in ("none", "mlp", "self_attn", "dots", "full", "scan dots", "scan")]
DEPTHS = [
    Case("step", how, layers, lora=lora) for lora in (False, True) for how in ("full", "scan") for layers in (4, 28)
]


def make_table(cases: list[Case], columns: dict[str, str]) -> str:
    """
    Measure programs.

    Args:
        cases (`list[Case]`):
            The programs.
        columns (`dict[str, str]`):
            Titles of the fields of [`Case`] to show.

    Returns:
        `str`: Markdown table.
    """
    lines = [
        f"| {' | '.join([*columns.values(), 'instructions', 'CPU seconds to compile', 'temporary memory'])} |",
        f"|{'---|' * len(columns)}---:|---:|---:|",
    ]
    for case in cases:
        cost = measure(case)
        cells = [str(vars(case)[name]) for name in columns]
        cells += [f"{cost.instructions:,}", f"{cost.cpu_seconds:.1f}", f"{cost.temp_bytes / 1e6:.1f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="replace the tables in docs/compile_time.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(asdict(compile_here(Case(**json.loads(arguments.case)), arguments.directory))))
        return
    setup = f"XLA on the host, float32; {versions()}; `python tests/benchmarks/compile_cost.py`"
    blocks = {
        "compile_depth": (DEPTHS, {"how": "layers are", "lora": "LoRA", "layers": "layers"}),
        "compile_head": (HEADS, {"how": "head", "tokens": "tokens", "vocab_size": "vocabulary"}),
        "compile_policies": (POLICIES, {"how": "policy"}),
    }
    for name, (cases, columns) in blocks.items():
        block = f"{make_table(cases, columns)}\n\n{setup}"
        print(block)
        if arguments.write_docs:
            write_block(DOCUMENT, name, block)


if __name__ == "__main__":
    main()
