"""Tables of [`qad_recovery`]."""

import argparse
import json
import math
import platform
import statistics
from pathlib import Path

from kd_recovery_tables import mean_of, recovered, show
from tables import versions

from hf_tpu_ext.formatting import format_bytes


#: The model that was rounded, and what rounding made of it.
ORIGINAL, ROUNDED = "original", "rounded only"
#: By kind of text the `loss` and the `kl`, and `bytes`.
Result = dict[str, dict[str, float] | int]
#: By `"original"` its result; by bits, e.g. `"int4"`, and name those of the seeds.
Results = dict[str, Result | dict[str, list[Result]]]


def make_tables(results: Results, kinds: list[str]) -> str:
    """Show the results."""
    original = results[ORIGINAL]
    loss = mean_of(original, kinds, "loss")
    head = ("weights", "", "on disk", "perplexity", "recovered of its logarithm", "KL to the original", "seeds")
    whole = [
        f"| {' | '.join(head)} |",
        "|---|---|" + "---:|" * 5,
        f"| bfloat16 | {ORIGINAL} | {format_bytes(original['bytes'])} | {math.exp(loss):.2f} | | | |",
    ]
    by_kind = [
        "| weights | recovered of the logarithm; KL to the original | " + " | ".join(kinds) + " |",
        "|---|---|" + "---:|" * len(kinds),
    ]
    for bits in (bits for bits in results if bits != ORIGINAL):
        # As those tables have it.
        named = {"teacher": [original], "student": results[bits][ROUNDED], **results[bits]}
        for name, by_seed in results[bits].items():
            cells = [
                format_bytes(by_seed[0]["bytes"]),
                show([math.exp(mean_of(result, kinds, "loss")) for result in by_seed], ".2f"),
                "" if name == ROUNDED else show(recovered(named, name, kinds), ".1%"),
                show([mean_of(result, kinds, "kl") for result in by_seed], ".3f"),
                "" if name == ROUNDED else str(len(by_seed)),
            ]
            whole.append(f"| {bits} | {name} | {' | '.join(cells)} |")
            cells = []
            for kind in kinds:
                share = "" if name == ROUNDED else f"{statistics.mean(recovered(named, name, [kind])):.1%}; "
                cells.append(f"{share}{statistics.mean(result[kind]['kl'] for result in by_seed):.3f}")
            by_kind.append(f"| {bits} | {name} | {' | '.join(cells)} |")
    return "\n".join([*whole, "", *by_kind])


def describe(arguments: argparse.Namespace, methods: dict, tokens: dict[str, int]) -> str:
    """Say what was run."""
    model = (
        "a tiny model that has learned additions"
        if arguments.tiny
        else "SmolLM2-135M-Instruct, whose weights are the values of a 4-bit file (Q4_1 of llama.cpp)"
    )
    trained = [methods[name] for name in arguments.methods if methods[name].learning_rate]
    sources = ["worked additions" if arguments.tiny else "proceedings of a conference"]
    sources *= not all(method.own_text for method in trained)
    if any(method.own_text for method in trained):
        sources.append(
            "as own text what the original writes itself, sampled at temperature 1, with the embeddings and the head as they "
            "were"
        )
    text = "; ".join(sources)
    if not arguments.tiny:
        text += ". The texts that are measured are those of the Canterbury corpus, code is functions of Python's standard library"
    rates = ", ".join(
        f"{methods[name].rates() if arguments.learning_rate is None else arguments.learning_rate} for {name}"
        for name in arguments.methods
        if methods[name].learning_rate
    )
    options = f"--steps {arguments.steps} --seeds {arguments.seeds}" + " --tiny" * arguments.tiny
    options += " --no-bf16" * (not arguments.bf16)
    if arguments.bits != [4, 3, 2]:
        options += f" --bits {' '.join(map(str, arguments.bits))}"
    if arguments.methods != list(methods):
        options += f" --methods {' '.join(json.dumps(name) for name in arguments.methods)}"
    if arguments.table != arguments.name:
        options += f" --table {arguments.table}"
    return "\n".join(
        [
            f"- original, and teacher: {model}; rounded: all linear layers but the head, symmetrically, in groups of "
            f"{arguments.group_size}",
            f"- trained on: {text}. {arguments.steps} steps of {arguments.batch_size} x {arguments.max_length} tokens, "
            f"{arguments.steps * arguments.batch_size * arguments.max_length:,} in all, the same for each",
            f"- adapters: LoRA, r={arguments.rank}, lora_alpha={arguments.rank}, on all linear layers; learning rates: {rates}; "
            "AdamW, cosine schedule",
            f"- with the teacher: its cached top 128 tokens alone (`kd_alpha={arguments.kd_alpha:g}`, "
            f"`kd_temperature={arguments.kd_temperature:g}`)",
            "- measured: what `hf-tpu export --quantize` wrote, with scales and all that is not rounded in bfloat16, loaded by "
            "transformers; adapters that stay are on top of it, in float32; "
            + ", ".join(f"{count:,} tokens of {kind}" for kind, count in tokens.items()),
            "- recovered: share of what rounding took, in nats per token; ± is the standard deviation over the seeds",
            f"- hardware: `backend={arguments.backend}` on {_processor()}, "
            f"{'bfloat16' if arguments.bf16 else 'float32'} compute; {versions()}",
            f"- command: `python tests/benchmarks/qad_recovery.py {options}`",
        ]
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
