"""
What DPO and a reward model learn of real text, beside stock TRL:

    python tests/benchmarks/preferences.py --write-docs

SmolLM2-135M-Instruct learns with LoRA to prefer how the Python language reference goes on to the same words shuffled, cut
short, or with a phrase repeated. Once with the trainers of this package, by XLA compiled for the host, and once with TRL's on
eager CPU, from the same seeds. Accuracies are those of pairs of chapters that are not trained on: of the sums of log-probs, of
the implicit rewards of DPO, of the scores of the reward model. KL is that of the trained model to its base, in nats per token
of the chosen completions. Both are computed by plain transformers from what was saved. A step of DPO is compared with a step of
supervised fine-tuning over as many tokens, by the CPU time of the process. The command fails where a logged loss of the two
differs by more than 1e-4, or a step of DPO takes more than 1.5 of the CPU time of the other.
"""

import os
import random
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any


os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, LoraConfig  # noqa: E402
from tables import make_parser, publish, versions  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig  # noqa: E402

from hf_tpu_ext import TPUDPOTrainer, TPURewardTrainer, TPUSFTTrainer  # noqa: E402


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

from prepare_quickstart import prepare_model  # noqa: E402


DOCUMENT = ROOT / "docs" / "preferences.md"
MODEL = ROOT / ".cache" / "quickstart" / "model"
PROMPT_WORDS, COMPLETION_WORDS, MAX_LENGTH = 12, 14, 48
#: Pairs that are held out.
HELD_OUT = 45
PAIRS_PER_STEP, SEED = 4, 0
MOST_DIFFERENCE, MOST_CPU = 1e-4, 1.5
#: Steps that compile, or are traced.
WARM_UP = 3


def shuffle(words: list[str], rng: random.Random) -> list[str]:
    """The same words in another order."""
    return rng.sample(words, len(words))


def cut(words: list[str], rng: random.Random) -> list[str]:
    """The first few words."""
    return words[: rng.randint(3, len(words) // 2)]


def repeat(words: list[str], rng: random.Random) -> list[str]:
    """A phrase of three to five words again and again, from some place on."""
    begin, size = rng.randint(2, len(words) // 2), rng.randint(3, 5)
    phrase = words[begin : begin + size]
    return (words[:begin] + phrase * len(words))[: len(words)]


DAMAGES: tuple[Callable[[list[str], random.Random], list[str]], ...] = (shuffle, cut, repeat)


def make_pairs(count: int, held_out: bool) -> Dataset:
    """
    Make pairs of passages from all over the chapters of the language reference, every fifth of which is held out.
    """
    rng = random.Random(SEED)
    chapters = [text for index, text in enumerate(topics.values()) if (index % 5 == 0) is held_out]
    size = PROMPT_WORDS + COMPLETION_WORDS
    passages = [
        words[begin : begin + size]
        for words in map(str.split, chapters)
        for begin in range(0, len(words) - size + 1, size)
    ]
    rows = []
    for number, words in enumerate(rng.sample(passages, count)):
        chosen = words[PROMPT_WORDS:]
        rejected = DAMAGES[number % len(DAMAGES)](chosen, rng)
        rows.append(
            {
                "prompt": " ".join(words[:PROMPT_WORDS]),
                "chosen": " " + " ".join(chosen),
                "rejected": " " + " ".join(rejected),
            }
        )
    return Dataset.from_list(rows)


class CPUPerStep(TrainerCallback):
    """Notes the CPU seconds of the process at the end of each step, whose log has waited for the device."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_log(self, args, state, control, **kwargs):
        self.seconds.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))

    @property
    def of_a_step(self) -> float:
        """Of the median step after [`WARM_UP`]."""
        seconds = self.seconds[WARM_UP:]
        return statistics.median(end - begin for begin, end in zip(seconds, seconds[1:], strict=False))


def train(
    cls: type, config_cls: type, steps: int, output_dir: Path, dataset: Dataset | None = None, **settings: Any
) -> dict[str, Any]:
    """Train with LoRA, save the adapter, and return the logged losses and the CPU seconds that a step took."""
    torch.manual_seed(SEED)
    task = "SEQ_CLS" if config_cls is RewardConfig else "CAUSAL_LM"
    cpu = CPUPerStep()
    trainer = cls(
        model=str(MODEL),
        args=config_cls(
            output_dir=str(output_dir),
            max_steps=steps,
            max_length=MAX_LENGTH,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
            **{"per_device_train_batch_size": PAIRS_PER_STEP, **settings},
        ),
        train_dataset=dataset or make_pairs(PAIRS_PER_STEP * steps, held_out=False),
        peft_config=LoraConfig(task_type=task, r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[cpu],
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "cpu_seconds": cpu.of_a_step}


def fine_tune(steps: int, directory: Path) -> dict[str, Any]:
    """Supervised fine-tuning on the rows of the pairs, as many in a step."""
    rows = [
        {"prompt": pair["prompt"], "completion": pair[name]}
        for pair in make_pairs(PAIRS_PER_STEP * steps, held_out=False)
        for name in ("chosen", "rejected")
    ]
    return train(
        TPUSFTTrainer,
        SFTConfig,
        steps,
        directory,
        Dataset.from_list(rows),
        per_device_train_batch_size=2 * PAIRS_PER_STEP,
    )


@torch.no_grad()
def log_probs(model, ids: list[int], prompt: int) -> torch.Tensor:
    """Log-probs of every token after each place of the completion, `(completion, vocabulary)`."""
    logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1)


def judge_policy(directory: Path, pairs: Dataset, tokenizer) -> dict[str, float]:
    """Held-out accuracies of a policy and of its base, and the KL between them."""
    model = AutoPeftModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    base_right = right = reward_right = 0
    divergences = []
    for pair in tqdm(pairs, desc="held out", leave=False):
        prompt = tokenizer(pair["prompt"])["input_ids"]
        sums = {}
        for name in ("chosen", "rejected"):
            completion = tokenizer(pair[name] + tokenizer.eos_token)["input_ids"]
            ids, taken = prompt + completion, torch.tensor(completion)[:, None]
            trained = log_probs(model, ids, len(prompt))
            with model.disable_adapter():
                base = log_probs(model, ids, len(prompt))
            sums[name] = trained.gather(1, taken).sum().item(), base.gather(1, taken).sum().item()
            if name == "chosen":
                divergences.append((trained.exp() * (trained - base)).sum(-1))
        chosen, rejected = sums["chosen"], sums["rejected"]
        right += chosen[0] > rejected[0]
        base_right += chosen[1] > rejected[1]
        reward_right += chosen[0] - chosen[1] > rejected[0] - rejected[1]
    return {
        "before": base_right / len(pairs),
        "after": right / len(pairs),
        "rewards": reward_right / len(pairs),
        "kl": torch.cat(divergences).mean().item(),
    }


def judge_reward_model(directory: Path, pairs: Dataset, tokenizer) -> dict[str, float]:
    """Held-out accuracy of a reward model. Before training its head says nothing, which is half of the pairs."""
    model = AutoPeftModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32, num_labels=1).eval()
    model.config.pad_token_id = tokenizer.pad_token_id

    @torch.no_grad()
    def score(text: str) -> float:
        return model(torch.tensor([tokenizer(text + tokenizer.eos_token)["input_ids"]])).logits.item()

    right = [score(pair["prompt"] + pair["chosen"]) > score(pair["prompt"] + pair["rejected"]) for pair in pairs]
    return {"after": sum(right) / len(pairs)}


def measure(steps: int) -> dict[str, dict[str, Any]]:
    """Train and judge all four."""
    prepare_model(MODEL)
    tokenizer, pairs = AutoTokenizer.from_pretrained(MODEL), make_pairs(HELD_OUT, held_out=True)
    measured = {}
    for task, config_cls, ours, stock, judge in (
        ("DPO", DPOConfig, TPUDPOTrainer, DPOTrainer, judge_policy),
        ("reward", RewardConfig, TPURewardTrainer, RewardTrainer, judge_reward_model),
    ):
        for name, cls, settings in (("hf_tpu_ext, XLA", ours, {}), ("TRL, eager", stock, {"use_cpu": True})):
            with TemporaryDirectory() as directory:
                result = train(cls, config_cls, steps, Path(directory), **settings)
                measured[f"{task}, {name}"] = result | judge(Path(directory), pairs, tokenizer)
        compared = [measured[key]["losses"] for key in measured if key.startswith(task)]
        difference = max(abs(one - other) for one, other in zip(*compared, strict=True))
        assert difference <= MOST_DIFFERENCE, f"{task}: losses differ by {difference}"
        measured[f"{task}, hf_tpu_ext, XLA"]["difference"] = difference
    with TemporaryDirectory() as directory:
        measured["SFT, hf_tpu_ext, XLA"] = fine_tune(3 * WARM_UP, Path(directory))
    ratio = measured["DPO, hf_tpu_ext, XLA"]["cpu_seconds"] / measured["SFT, hf_tpu_ext, XLA"]["cpu_seconds"]
    assert ratio <= MOST_CPU, f"a step of DPO takes {ratio:.2f} of the CPU time of one of SFT"
    return measured


def table(measured: dict[str, dict[str, Any]], steps: int) -> str:
    """The measurements as Markdown."""

    def percent(result: dict[str, Any], key: str) -> str:
        return f"{100 * result[key]:.0f} %" if key in result else ""

    lines = [
        f"{steps} steps of {PAIRS_PER_STEP} pairs, {HELD_OUT} held-out pairs, rows of {MAX_LENGTH} tokens, float32. "
        f"{versions()}.",
        "",
        "| | accuracy of the base | after training | of implicit rewards | KL to the base | first and last loss | largest difference of a loss | CPU time of a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in measured.items():
        kl = f"{result['kl']:.4f}" if "kl" in result else ""
        difference = f"{result['difference']:.1e}" if "difference" in result else ""
        lines.append(
            f"| {name} | {percent(result, 'before')} | {percent(result, 'after')} | {percent(result, 'rewards')} | {kl} | "
            f"{result['losses'][0]:.4f}, {result['losses'][-1]:.4f} | {difference} | {result['cpu_seconds']:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run (default: 24)")
    arguments = parser.parse_args()
    measured = measure(arguments.steps)
    publish(arguments, DOCUMENT, "preferences", table(measured, arguments.steps), measured)


if __name__ == "__main__":
    main()
