"""
Plans of GRPO, and of on-policy distillation, by the compiler for TPU:

    python tests/benchmarks/grpo_plans.py --write-docs

Qwen2.5-0.5B, 8 prompts with 8 completions in an optimizer step of a chip, prompts of 256 and completions of 512
tokens, micro-steps of 16 completions, whose layers read a prompt once, full rematerialization; once completions of 2,048
tokens, in micro-steps of 8; of distillation 64 prompts with a completion each. Nothing ran on a TPU: memory and cycles are what
the compiler says, and generation is the time where no completion ends early.
"""

import sys
import tempfile
from pathlib import Path

from tables import make_parser, publish
from tpu_plans import LORA, ROOT, Case, plan

from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.hardware.topologies import find_topology


DOCUMENT = ROOT / "docs" / "grpo.md"
PROMPT, COMPLETION = 256, 512
SETTINGS = LORA | {
    "reward_funcs": "recipes.rewards.same_number",
    "num_generations": "8",
    "share_prompts": "on",
    "max_completion_length": str(COMPLETION),
    "per_device_train_batch_size": "16",
    "gradient_accumulation_steps": "4",
    "max_steps": "1000",
}
OF_REWARDS = ("reward_funcs", "num_generations", "share_prompts")
CASES = [
    Case("LoRA", "Qwen2.5-0.5B", "v5e-1", PROMPT, SETTINGS, command="grpo"),
    Case(
        "LoRA, share_prompts: off",
        "Qwen2.5-0.5B",
        "v5e-1",
        PROMPT,
        SETTINGS | {"share_prompts": "off"},
        command="grpo",
    ),
    Case("LoRA, beta: 0.04", "Qwen2.5-0.5B", "v5e-1", PROMPT, SETTINGS | {"beta": "0.04"}, command="grpo"),
    Case("LoRA", "Qwen2.5-0.5B", "v5e-8", PROMPT, SETTINGS, command="grpo"),
    Case(
        "full, mesh: fsdp",
        "Qwen2.5-0.5B",
        "v5e-8",
        PROMPT,
        {key: value for key, value in SETTINGS.items() if key not in LORA} | {"mesh": "fsdp"},
        command="grpo",
    ),
    Case(
        "LoRA, completions of 2,048 in micro-steps of 8",
        "Qwen2.5-0.5B",
        "v5e-1",
        PROMPT,
        SETTINGS
        | {
            "max_completion_length": "2048",
            "per_device_train_batch_size": "8",
            "gradient_accumulation_steps": "8",
        },
        command="grpo",
    ),
    Case(
        "LoRA, distilled on-policy by Qwen2.5-1.5B",
        "Qwen2.5-0.5B",
        "v5e-1",
        PROMPT,
        {key: value for key, value in SETTINGS.items() if key not in OF_REWARDS}
        | {"teacher_model_init_kwargs": '{"dtype": "bfloat16"}'},
        command="distillation",
        teacher="Qwen2.5-1.5B",
    ),
]


def make_row(case: Case, planned: dict) -> str:
    """A row of the table."""
    derived = planned["derived"]
    generation, training = derived["generation"], derived["step"]
    cache = max(program["arguments"].get("key-value cache", 0) for program in planned["programs"])
    chips, tokens = find_topology(case.topology).num_chips, derived["tokens_generated"]
    decode = next(program for program in planned["programs"] if program["kind"] == "decode")
    cells = [
        case.model,
        case.title,
        case.topology,
        "yes" if derived["fits"] else "no",
        format_bytes(derived["peak_bytes"]),
        format_bytes(cache),
        f"{decode['cost']['cycles'] / 1e6:,.0f} M",
        f"{generation['seconds'][1]:.2f} s",
        f"{tokens / generation['seconds'][1] / chips:,.0f}",
        f"{training['seconds'][1]:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    arguments = make_parser(__doc__, DOCUMENT).parse_args()
    lines = [
        "| model | run | on | fits | a chip holds | key-value cache | cycles of decoding | generation is expected to take "
        "| tokens/s/chip | training of the step is expected to take |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    measured = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            measured.append(plan(case, Path(directory))[0])
        lines.append(make_row(case, measured[-1]))
        print(lines[-1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in measured[0]["versions"].items())
    publish(arguments, DOCUMENT, "grpo_plans", "\n".join([*lines, "", versions]), measured)


if __name__ == "__main__":
    main()
