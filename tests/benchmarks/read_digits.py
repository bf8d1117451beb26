"""
Tiny vision language models that learn to read rendered digits, with this package on XLA and with TRL on eager CPU.

    python tests/benchmarks/read_digits.py [--families NAME ...] [--write-docs]

Both train from the same weights, seeds and pictures. Held-out pictures are read right by their pixels' places and by nothing else:
with these in another order, by chance. With `--write-docs` the table goes into docs/images.md.
"""

import sys
import tempfile
from pathlib import Path

import torch
import trl
from tables import make_parser, publish, versions
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny_vision import make_digits, make_vision_model


DOCUMENT = Path(__file__).parents[2] / "docs" / "images.md"
#: By family, the optimizer steps, of 32 pictures each, how many pictures there are, and the tokens of an image: those of Gemma 3 are
#: means over patches, which are whole digits where there are four.
FAMILIES = {"gemma3": (1000, 8000, 16), "smolvlm": (600, 4000, 4), "qwen2_5_vl": (600, 4000, 4)}
HELD_OUT = 512
TRAINERS = {
    "this package, XLA": (TPUSFTTrainer, TPUSFTConfig, {"run_report": False, "step_status": False}),
    "TRL, eager": (trl.SFTTrainer, trl.SFTConfig, {"use_cpu": True}),
}


def measure(family: str, name: str, directory: Path) -> dict[str, float]:
    """Train a model of a family, and measure which share of held-out digits it reads, also with the pixels in another order."""
    trainer_class, config_class, settings = TRAINERS[name]
    steps, pictures, tokens = FAMILIES[family]
    path = make_vision_model(directory / family, family, tokens_per_image=tokens)
    trainer = trainer_class(
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32),
        args=config_class(
            output_dir=str(directory / "run"),
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            max_steps=steps,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            logging_steps=100,
            max_length=72,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=make_digits(pictures),
        eval_dataset=make_digits(HELD_OUT, seed=1),
        processing_class=AutoProcessor.from_pretrained(path),
    )
    loss = trainer.train().training_loss
    held_out = {"held out": trainer.eval_dataset, "shuffled": make_digits(HELD_OUT, seed=1, shuffled=True)}
    # An answer is a digit and two tokens that end it, which a model learns at once.
    read = {key: 3 * trainer.evaluate(rows)["eval_mean_token_accuracy"] - 2 for key, rows in held_out.items()}
    return {"loss": loss, **read}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    arguments = parser.parse_args()
    measured = []
    lines = [
        "| family | steps of 32 pictures | trained with | mean loss | held-out digits read | with shuffled pixels |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for family in arguments.families:
        for name in TRAINERS:
            with tempfile.TemporaryDirectory() as directory:
                found = measure(family, name, Path(directory))
            measured.append({"family": family, "trainer": name, **found})
            cells = [family, FAMILIES[family][0], name, f"{found['loss']:.4f}"]
            cells += [f"{100 * found[key]:.1f} %" for key in ("held out", "shuffled")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", f"{versions()}; `python tests/benchmarks/read_digits.py`"]
    publish(arguments, DOCUMENT, "read_digits", "\n".join(lines), measured)


if __name__ == "__main__":
    main()
