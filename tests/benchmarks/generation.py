"""
Tokens per second of generated text, beside `generate` of transformers:

    python tests/benchmarks/generation.py --write-docs

A small Qwen2 (4 layers, hidden size 64, float32), and one of the sizes of SmolLM2-135M (30 layers, hidden size 576), continue 32
tokens greedily, to the full number of new tokens. Ours is the text of a trainer, as rollouts are: two programs by XLA compiled
for the host, replayed from the third time on; eager is `generate` on CPU with the same number of threads. Both are measured
again where XLA has a device for each thread, `CPU_NUM_DEVICES`, and each of them its part of the rows. A token ends a row, as in
rollouts, which no row chooses. `generate` on torch_xla is measured after it has compiled: with that token over a few tokens
only, since it then compiles for every token all that was before it, and over all of them without, where it never asks whether
rows have ended and compiles the whole text as one graph, for some minutes. Each figure is the best of three. Rows whose greedy
tokens are eager's are counted: among ten thousands of tokens, two first choices may be as likely as float32 can tell, and the
text goes on otherwise. The command fails below 95 %.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any


os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from tables import make_parser, publish, versions  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, TrainingArguments  # noqa: E402

from hf_tpu_ext import TPUTrainer  # noqa: E402
from hf_tpu_ext.trainers.run.text import TextGeneration  # noqa: E402


DOCUMENT = Path(__file__).parents[2] / "docs" / "generation.md"
#: Tokens of a prompt, calls that trace, and calls that are measured.
PROMPT, TRACED, ROUNDS = 32, 2, 3
#: Sizes of the models. Their weights are random, of the small one far from uniform, so that first choices are clear.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
OF_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
CASES = ((SMALL, 8, 128), (SMALL, 64, 128), (SMALL, 64, 512), (SMALL, 256, 128), (OF_135M, 16, 64))
#: The token that ends a row.
END = 1
#: The case that torch_xla's `generate` is measured in: so many tokens where rows may end, and where they may not.
STOCK_ROWS, STOCK_TOKENS = 64, {True: 16, False: 128}


def make_model(sizes: dict[str, Any]):
    """The model on the host."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes)).eval()
    # A score of 0, which is never the largest.
    model.get_output_embeddings().weight.data[END] = 0
    return model


def best(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """The least wall time, the least CPU time of this process, and what the last call returned."""
    walls, cpus, result = [], [], None
    for _ in range(ROUNDS):
        wall, cpu = time.monotonic(), time.process_time()
        result = call()
        walls.append(time.monotonic() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus), result


def measure() -> dict[str, Any]:
    """Measure all cases."""
    rows, sizes = [], None
    for case_sizes, batch, new in tqdm(CASES, desc="generating"):
        if case_sizes is not sizes:
            sizes, eager = case_sizes, make_model(case_sizes)
            with tempfile.TemporaryDirectory() as directory:
                trainer = TPUTrainer(model=make_model(sizes), args=TrainingArguments(directory, report_to="none"))
            backend = trainer.backend
        prompts = torch.randint(3, 1024, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(prompts)
        settings = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=END)
        text = TextGeneration(trainer, GenerationConfig(**settings), [PROMPT])
        before = backend.counters()
        for _ in range(TRACED):
            text.generate(prompts.tolist())
        compiled = backend.counters() - before
        ours = best(lambda each=text, ids=prompts: each.generate(ids.tolist()).token_ids)
        spent = backend.counters() - before
        stock = best(partial(eager.generate, input_ids=prompts, attention_mask=mask, **settings))
        same = sum(row == text for row, text in zip(stock[2][:, PROMPT:].tolist(), ours[2], strict=True))
        if same < 0.95 * batch:
            sys.exit(f"{batch} x {new}: only {same} rows have the same tokens")
        tokens = batch * new
        rows.append(
            {
                "model": f"{sizes['num_hidden_layers']} layers, hidden size {sizes['hidden_size']}",
                "batch": batch,
                "new_tokens": new,
                "ours": tokens / ours[0],
                "eager": tokens / stock[0],
                "same": same,
                "ours_cpu_seconds": ours[1],
                "eager_cpu_seconds": stock[1],
                "compiles": compiled.compiles,
                "later_compiles": spent.compiles - compiled.compiles,
                "executions": (spent.executions - compiled.executions) / ROUNDS,
                "reads": (spent.reads - compiled.reads) / ROUNDS,
            }
        )
    stock = {}
    if backend.num_chips == 1:
        stock = {tokens: measure_torch_xla(backend, may_end) for may_end, tokens in STOCK_TOKENS.items()}
    return {"rows": rows, "torch_xla": stock}


def measure_on_devices(count: int) -> dict[str, Any]:
    """Measure all cases in a process where XLA has so many devices on this CPU."""
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "found.json"
        command, environment = [sys.executable, __file__, "--json", found], {"CPU_NUM_DEVICES": str(count)}
        subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(found.read_text(encoding="utf-8"))


def measure_torch_xla(backend, may_end: bool) -> float:
    """Tokens per second of transformers' `generate` on an XLA device, after it has compiled."""
    model, tokens = make_model(SMALL).to(backend.device), STOCK_TOKENS[may_end]
    model.generation_config.eos_token_id = END if may_end else None
    prompts = torch.randint(3, 1024, (STOCK_ROWS, PROMPT), generator=torch.Generator().manual_seed(1)).to("xla")
    settings = dict(max_new_tokens=tokens, do_sample=False, pad_token_id=0)

    def call():
        return model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings).cpu()

    call()
    seconds, _, _ = best(call)
    return STOCK_ROWS * tokens / seconds


def describe(measured: dict[str, Any], on_devices: dict[str, Any]) -> str:
    """The table, as Markdown."""
    count = torch.get_num_threads()
    lines = [
        "| model | batch | new tokens | tokens/s | eager CPU | ratio | ratio of CPU time "
        f"| tokens/s on {count} devices | ratio | graphs compiled, first call and later | executions "
        "| device-to-host reads | rows with the same tokens |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row, split in zip(measured["rows"], on_devices["rows"], strict=True):
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['new_tokens']} | {row['ours']:,.0f} | {row['eager']:,.0f} | "
            f"{row['ours'] / row['eager']:.1f} | {row['eager_cpu_seconds'] / row['ours_cpu_seconds']:.1f} | "
            f"{split['ours']:,.0f} | {split['ours'] / split['eager']:.1f} | "
            f"{row['compiles']}, {row['later_compiles']} | {row['executions']:.0f} | {row['reads']:.0f} | {row['same']} |"
        )
    case = next(place for place, row in enumerate(measured["rows"]) if row["batch"] == STOCK_ROWS)
    ours = [each["rows"][case]["ours"] for each in (measured, on_devices)]
    lines += [
        "",
        f"`generate` of transformers on torch_xla after it has compiled, {STOCK_ROWS} rows, one device, and how many times as many "
        f"tokens ours are for {measured['rows'][case]['new_tokens']} new tokens:",
        "",
        f"| | new tokens | tokens/s | ours, one device | on {count} devices |",
        "|---|---:|---:|---:|---:|",
    ]
    names = {
        True: "rows may end: it computes all tokens again for each",
        False: "no token ends a row: the whole text is one graph",
    }
    for may_end, tokens in STOCK_TOKENS.items():
        stock = measured["torch_xla"][tokens]
        lines.append(f"| {names[may_end]} | {tokens} | {stock:,.0f} | {ours[0] / stock:.1f} | {ours[1] / stock:.1f} |")
    lines += [
        "",
        f"{count} threads; {versions()}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = make_parser(__doc__, DOCUMENT)
    arguments, is_beside = parser.parse_args(), "CPU_NUM_DEVICES" in os.environ
    if is_beside and not arguments.json:
        parser.error("with CPU_NUM_DEVICES there is no table: take it out of the environment, or give --json FILE")
    measured = measure()
    if is_beside:
        arguments.json.write_text(json.dumps(measured), encoding="utf-8")
    else:
        on_devices = measure_on_devices(torch.get_num_threads())
        everything = {"one device": measured, "devices": on_devices}
        publish(arguments, DOCUMENT, "generation", describe(measured, on_devices), everything)
