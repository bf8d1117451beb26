"""
A small model learns to add by GRPO, beside stock TRL:

    python tests/benchmarks/grpo.py --write-docs

SmolLM2-135M-Instruct is asked to add two numbers of one digit and to reply with the result. A completion is rewarded with 1 where
its last number is the sum, and with 0.5 where it is an equation and nothing else, as "3 + 4 = 7". LoRA, 8 completions of each prompt, temperature 1,
float32. Once with the trainer of this package, by XLA compiled for the host, and once with TRL's on eager CPU: from the same
weights, prompts and settings, and with other random numbers, so rewards are compared as means over steps and `--seeds` runs.
The sums that are asked at the end are not trained on, and answered greedily by plain transformers. What a run has measured is
kept in the work directory, and not run again; `--only ours` or `--only stock` runs those of one of the two.
"""

import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import AutoPeftModelForCausalLM, LoraConfig  # noqa: E402
from tables import make_parser, publish, versions  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from hf_tpu_ext import TPUGRPOTrainer  # noqa: E402


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from prepare_quickstart import prepare_model  # noqa: E402


DOCUMENT = ROOT / "docs" / "grpo.md"
PICTURE = ROOT / "docs" / "assets" / "grpo_rewards.svg"
MODEL = ROOT / ".cache" / "quickstart" / "model"
WORK = ROOT / ".cache" / "grpo"
QUESTION = "Calculate {} + {}. Reply with just the result."
PROMPTS_PER_STEP, GENERATIONS, MAX_COMPLETION = 4, 8, 12
HELD_OUT = 20
#: Steps that compile, or are traced.
WARM_UP = 3
#: Steps whose rewards are averaged, at the beginning and at the end.
ENDS = 8
NAMES = {"ours": "hf_tpu_ext, XLA", "stock": "TRL, eager"}


def split_sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The sums that are trained on, and those that are held out."""
    sums = [(one, other) for one in range(1, 10) for other in range(1, 10)]
    random.Random(0).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


def ask(one: int, other: int) -> list[dict[str, str]]:
    """A sum as a conversation."""
    return [{"role": "user", "content": QUESTION.format(one, other)}]


def last_number(text: str) -> int | None:
    """The last number in a text."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def sum_is_right(completions, total, **kwargs) -> list[float]:
    """1 where the last number of a completion is the sum."""
    return [float(last_number(each[0]["content"]) == wanted) for each, wanted in zip(completions, total, strict=True)]


def is_equation(completions, **kwargs) -> list[float]:
    """0.5 where a completion is an equation and nothing else."""
    equation = re.compile(r"\d+ ?\+ ?\d+ ?= ?\d+\.?")
    return [0.5 * (equation.fullmatch(each[0]["content"].strip()) is not None) for each in completions]


class Clock:
    """
    Notes the time and the CPU seconds of the process whenever completions are rewarded, as happens once a step. A callback
    would see layers that run as a loop as they are, for which they leave it.
    """

    def __init__(self):
        self.times: list[tuple[float, float]] = []

    def nothing(self, completions, **kwargs) -> list[float]:
        """A reward of 0."""
        self.times.append((time.monotonic(), time.process_time()))
        return [0.0] * len(completions)

    def of_a_step(self) -> tuple[float, float]:
        """Wall and CPU seconds of the median step after [`WARM_UP`]."""
        spent = list(zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False))
        return tuple(statistics.median(end[of] - begin[of] for begin, end in spent) for of in (0, 1))


def train(cls: type, steps: int, output_dir: Path, learning_rate: float, seed: int, **settings: Any) -> dict[str, Any]:
    """Train with LoRA, save the adapter, and return the rewards and what a step took."""
    trained, _ = split_sums()
    # Each is asked many times.
    sums = random.Random(seed).choices(trained, k=PROMPTS_PER_STEP * steps)
    torch.manual_seed(seed)
    clock = Clock()
    trainer = cls(
        model=str(MODEL),
        reward_funcs=[sum_is_right, is_equation, clock.nothing],
        args=GRPOConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=MAX_COMPLETION,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            seed=seed,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": ask(*pair), "total": sum(pair)} for pair in sums]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
    )
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    trainer.save_model()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    wall, cpu = clock.of_a_step()
    return {
        "rewards": [log["reward"] for log in logs],
        "right": [log["rewards/sum_is_right/mean"] for log in logs],
        "equation": [2 * log["rewards/is_equation/mean"] for log in logs],
        "lengths": [log["completions/mean_length"] for log in logs],
        "seconds": seconds,
        "wall_of_a_step": wall,
        "cpu_of_a_step": cpu,
        "held_out": answer(output_dir),
    }


@torch.no_grad()
def answer(directory: Path) -> dict[str, float]:
    """The share of held-out sums that are answered rightly, by the base and by the adapter."""
    model = AutoPeftModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    _, held_out = split_sums()

    def share() -> float:
        right = 0
        for pair in held_out:
            inputs = tokenizer.apply_chat_template(
                ask(*pair), add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            made = model.generate(**inputs, max_new_tokens=MAX_COMPLETION, do_sample=False)
            text = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            right += last_number(text) == sum(pair)
        return right / len(held_out)

    after = share()
    with model.disable_adapter():
        return {"before": share(), "after": after}


def table(measured: dict[str, list[dict[str, Any]]], steps: int, learning_rate: float) -> str:
    """The measurements as Markdown: means over seeds, and between which ones they are."""
    seeds = max(map(len, measured.values()))
    lines = [
        f"![Mean reward of each step](assets/{PICTURE.name})",
        "",
        f"{steps} steps of {PROMPTS_PER_STEP} prompts with {GENERATIONS} completions of at most {MAX_COMPLETION} tokens, learning "
        f"rate {learning_rate:g}{f'; means over {seeds} seeds, with the least and the largest' if seeds > 1 else ''}. {versions()}.",
        "",
        f"| | mean reward of the first {ENDS} steps | of the last {ENDS} | right, last {ENDS} | an equation alone, last {ENDS} | "
        "held-out sums right, before | after | wall time of a step | CPU time of a step | of the run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]

    def spread(values: Iterable[float], form: str) -> str:
        values = list(values)
        mean = form.format(statistics.mean(values))
        return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"

    for name, results in measured.items():
        means = {
            key: [
                [statistics.mean(result[key][part]) for result in results]
                for part in (slice(ENDS), slice(-ENDS, None))
            ]
            for key in ("rewards", "right", "equation")
        }
        cells = [
            NAMES[name],
            spread(means["rewards"][0], "{:.2f}"),
            spread(means["rewards"][1], "{:.2f}"),
            spread(means["right"][1], "{:.0%}"),
            spread(means["equation"][1], "{:.0%}"),
            f"{results[0]['held_out']['before']:.0%}",
            spread((result["held_out"]["after"] for result in results), "{:.0%}"),
            spread((result["wall_of_a_step"] for result in results), "{:.1f} s"),
            spread((result["cpu_of_a_step"] for result in results), "{:.1f} s"),
            spread((result["seconds"] / 60 for result in results), "{:.1f} min"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(measured: dict[str, list[dict[str, Any]]]) -> None:
    """The mean reward of each step, averaged over five steps and all seeds, within the least and the largest of a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, results in measured.items():
        curves = [
            [
                statistics.mean(result["rewards"][max(0, place - 4) : place + 1])
                for place in range(len(result["rewards"]))
            ]
            for result in results
        ]
        steps = range(1, len(curves[0]) + 1)
        axes.plot(steps, [statistics.mean(values) for values in zip(*curves, strict=True)], label=NAMES[name])
        low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
        axes.fill_between(steps, low, high, alpha=0.2)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.5))
    axes.legend(loc="lower right")
    figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps of each run (default: 48)")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="learning rate (default: 1e-4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each of the two (default: 3)")
    parser.add_argument(
        "--only", choices=list(NAMES), help="run those of one of the two, and show what was kept of the other"
    )
    arguments = parser.parse_args()
    prepare_model(MODEL)
    measured = {}
    for seed in range(arguments.seeds):
        for name, cls, settings in (("ours", TPUGRPOTrainer, {}), ("stock", GRPOTrainer, {"use_cpu": True})):
            run = f"{name}-{arguments.steps}-{arguments.learning_rate:g}-{seed}"
            kept = WORK / f"{run}.json"
            if arguments.only in (None, name) and not kept.is_file():
                result = train(cls, arguments.steps, WORK / run, arguments.learning_rate, seed, **settings)
                kept.write_text(json.dumps(result), encoding="utf-8")
            if kept.is_file():
                measured.setdefault(name, []).append(json.loads(kept.read_text(encoding="utf-8")))
    if arguments.write:
        draw(measured)
    publish(arguments, DOCUMENT, "grpo", table(measured, arguments.steps, arguments.learning_rate), measured)


if __name__ == "__main__":
    main()
