"""
How fast SmolLM2-135M learns on this machine's processor, beside stock TRL:

    python tests/benchmarks/smollm2.py --write-docs

SmolLM2-135M-Instruct learns with LoRA to write docstrings, as in the quickstart: the same rows in the same order, in float32, by
XLA compiled for the host. The rows of stock TRL are padded to one length, since it would compile for minutes at each new one. Each has
a process of its own, and the two take turns, as in step_overhead.py. Tokens are those
of the rows, without padding. The command fails if a loss differs from that of stock TRL by more than 1e-4.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from meter import Plan
from step_overhead import check_losses, describe_processor, measure, ratio
from tables import make_parser, publish, write_block
from transformers import AutoTokenizer


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from prepare_quickstart import make_docstrings, prepare_model  # noqa: E402


DOCUMENT, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
PREPARED = ROOT / ".cache" / "quickstart"
BATCH_SIZE, MAX_LENGTH = 2, 192
NAMES = {
    "stacked": "XLA | this package",
    "stock_padded": "XLA | stock TRL",
}


def make_plan(directory: Path, repeats: int) -> Plan:
    """Write the rows of the quickstart as tokens, and say what of the training is measured."""
    prepare_model(PREPARED / "model")
    make_docstrings(directory / "data", num_test=1)
    (directory / "model").symlink_to(PREPARED / "model")
    tokenizer = AutoTokenizer.from_pretrained(PREPARED / "model")
    lines = (directory / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    plan = Plan(
        directory, MAX_LENGTH, BATCH_SIZE, logging_steps=2, window=2, repeats=repeats, learning_rate=5e-4, lora=True
    )
    rows = [json.loads(line) for line in lines[: plan.total_steps * BATCH_SIZE]]
    ids = [
        tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=True)["input_ids"][:MAX_LENGTH]
        for row in rows
    ]
    (directory / "rows.json").write_text(json.dumps([{"input_ids": row} for row in ids]), encoding="utf-8")
    return plan


def make_table(results: dict[str, dict[str, Any]], tokens_per_step: float) -> str:
    """Show what a second brings: steps and tokens, and the ratio to stock TRL."""
    lines = ["| | | steps a second | tokens a second | of stock TRL |", "|---|---|---:|---:|---:|"]
    for name, result in results.items():
        rate = result["steps_per_second"]
        lines.append(
            f"| {NAMES[name]} | {rate:.2f} | {rate * tokens_per_step:.0f} | {ratio(results, name, 'stock_padded'):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark, print its table, and write it into the README, too."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--repeats", type=int, default=5, help="timed windows of each contender (default: 5)")
    arguments = parser.parse_args()
    os.environ |= {"PJRT_DEVICE": "CPU", "HF_TPU_EXT": "0", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        plan = make_plan(Path(directory), arguments.repeats)
        results = measure(plan, list(NAMES))
        # Those of the steps that are timed.
        first, last = (edge * BATCH_SIZE for edge in (plan.edges[0], plan.edges[-1]))
        tokens = sum(len(row["input_ids"]) for row in plan.rows[first:last]) / (plan.edges[-1] - plan.edges[0])
    table = make_table(results, tokens)
    setup = [
        f"LoRA of rank 8, float32, batch of {BATCH_SIZE} rows of at most {MAX_LENGTH} tokens, {tokens:.0f} in all on average",
        f"medians over {plan.repeats} windows of {plan.window} steps, which take turns, on a machine with other work; the ratio is that of windows of one turn",
        f"{describe_processor()}; {'; '.join(dict.fromkeys(result['versions'] for result in results.values()))}",
    ]
    publish(arguments, DOCUMENT, "smollm2", "\n".join([table, "", *(f"- {line}" for line in setup)]), results)
    if arguments.write:
        write_block(README, "smollm2", table)
    check_losses(results, "stock_padded")


if __name__ == "__main__":
    main()
