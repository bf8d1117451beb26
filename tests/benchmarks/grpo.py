"""
A small model learns to add by GRPO, beside stock TRL:

    python tests/benchmarks/grpo.py --write-docs

SmolLM2-135M-Instruct is asked to add two numbers of one digit and to reply with the result. A completion is rewarded with 1 where
its last number is the sum, and with 0.5 where it is an equation and nothing else, as "3 + 4 = 7". LoRA, 8 completions of each prompt, temperature 1,
float32. Once with the trainer of this package, by XLA compiled for the host, and once with TRL's on eager CPU: from the same
weights, prompts and settings, and with other random numbers, so rewards are compared as means over steps. The sums that are
asked at the end are not trained on, and answered greedily by plain transformers. `--only ours` or `--only stock` runs one of the
two, and keeps what it measured in the work directory for the other.
"""

import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from tables import make_parser, publish, versions
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hf_tpu_ext import TPUGRPOTrainer


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from prepare_quickstart import prepare_model  # noqa: E402


DOCUMENT = ROOT / "docs" / "grpo.md"
PICTURE = ROOT / "docs" / "assets" / "grpo_rewards.svg"
MODEL = ROOT / ".cache" / "quickstart" / "model"
WORK = ROOT / ".cache" / "grpo"
QUESTION = "Calculate {} + {}. Reply with just the result."
PROMPTS_PER_STEP, GENERATIONS, MAX_COMPLETION = 4, 8, 12
SEED, HELD_OUT = 0, 20
#: Steps that compile, or are traced.
WARM_UP = 3
#: Steps whose rewards are averaged, at the beginning and at the end.
ENDS = 8
NAMES = {"ours": "hf_tpu_ext, XLA", "stock": "TRL, eager"}


def split_sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The sums that are trained on, and those that are held out."""
    sums = [(one, other) for one in range(1, 10) for other in range(1, 10)]
    random.Random(SEED).shuffle(sums)
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


class Clock(TrainerCallback):
    """Notes the time at the end of each step, whose log has waited for the device, and the CPU seconds of the process."""

    def __init__(self):
        self.times: list[tuple[float, float]] = [(time.monotonic(), time.process_time())]

    def on_log(self, args, state, control, **kwargs):
        self.times.append((time.monotonic(), time.process_time()))

    def of_a_step(self) -> tuple[float, float]:
        """Wall and CPU seconds of the median step after [`WARM_UP`]."""
        spent = list(zip(self.times[WARM_UP:], self.times[WARM_UP + 1 :], strict=False))
        return tuple(statistics.median(end[of] - begin[of] for begin, end in spent) for of in (0, 1))


def train(cls: type, steps: int, output_dir: Path, learning_rate: float, **settings: Any) -> dict[str, Any]:
    """Train with LoRA, save the adapter, and return the rewards and what a step took."""
    trained, _ = split_sums()
    # Each is asked many times.
    sums = random.Random(SEED).choices(trained, k=PROMPTS_PER_STEP * steps)
    torch.manual_seed(SEED)
    clock = Clock()
    trainer = cls(
        model=str(MODEL),
        reward_funcs=[sum_is_right, is_equation],
        args=GRPOConfig(
            output_dir=str(output_dir),
            max_steps=steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=MAX_COMPLETION,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": ask(*pair), "total": sum(pair)} for pair in sums]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[clock],
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


def table(measured: dict[str, dict[str, Any]], steps: int) -> str:
    """The measurements as Markdown."""
    lines = [
        f"![Mean reward of each step](assets/{PICTURE.name})",
        "",
        f"{steps} steps of {PROMPTS_PER_STEP} prompts with {GENERATIONS} completions of at most {MAX_COMPLETION} tokens. "
        f"{versions()}.",
        "",
        f"| | mean reward of the first {ENDS} steps | of the last {ENDS} | right, last {ENDS} | an equation alone, last {ENDS} | "
        "held-out sums right, before | after | wall time of a step | CPU time of a step | of the run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, result in measured.items():
        mean = statistics.mean
        lines.append(
            f"| {NAMES[name]} | {mean(result['rewards'][:ENDS]):.2f} | {mean(result['rewards'][-ENDS:]):.2f} | "
            f"{100 * mean(result['right'][-ENDS:]):.0f} % | {100 * mean(result['equation'][-ENDS:]):.0f} % | "
            f"{100 * result['held_out']['before']:.0f} % | {100 * result['held_out']['after']:.0f} % | "
            f"{result['wall_of_a_step']:.1f} s | {result['cpu_of_a_step']:.1f} s | {result['seconds'] / 60:.1f} min |"
        )
    return "\n".join(lines)


def draw(measured: dict[str, dict[str, Any]]) -> None:
    """The mean reward of each step, averaged over five."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, result in measured.items():
        rewards = result["rewards"]
        smooth = [statistics.mean(rewards[max(0, place - 4) : place + 1]) for place in range(len(rewards))]
        axes.plot(range(1, len(rewards) + 1), smooth, label=NAMES[name])
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.5))
    axes.legend()
    figure.savefig(PICTURE, format="svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default: 60)")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="learning rate (default: 2e-4)")
    parser.add_argument("--only", choices=list(NAMES), help="run one of the two; the other was run before")
    arguments = parser.parse_args()
    prepare_model(MODEL)
    measured = {}
    for name, cls, settings in (("ours", TPUGRPOTrainer, {}), ("stock", GRPOTrainer, {"use_cpu": True})):
        kept = WORK / f"{name}.json"
        if arguments.only in (None, name):
            result = train(cls, arguments.steps, WORK / name, arguments.learning_rate, **settings)
            kept.write_text(json.dumps(result), encoding="utf-8")
        if kept.is_file():
            measured[name] = json.loads(kept.read_text(encoding="utf-8"))
    if arguments.write:
        draw(measured)
    publish(arguments, DOCUMENT, "grpo", table(measured, arguments.steps), measured)


if __name__ == "__main__":
    main()
