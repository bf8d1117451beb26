"""`hf-tpu prepare`: create the models and data that recipes, tests and benchmarks run on, without the Hub."""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..installing import install_command


TINY = """\
Create a model of two layers and synthetic data for it, in seconds and without the network. Under the output directory:
  model/        random weights and a byte-level tokenizer with a chat template
  teacher/      another of its kind
  data/         worked additions in chat form: train.jsonl and test.jsonl
  preferences/  additions with a right (chosen) and a wrong (rejected) answer
  unpaired/     additions with an answer that is right or wrong (label)
  questions/    additions to be answered, with their solution
With the model type of a vision language model, for instance smolvlm (needs pillow and torchvision):
  model/        random weights and a processor of text and images
  data/         pictures of digits and questions about them
"""
# Says that what is in a directory was made here, and may be made anew.
_MARK = ".made_by_hf-tpu_prepare"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the `prepare` subcommand."""
    parser = subparsers.add_parser(
        "prepare",
        help="create a model and data locally, without the Hub",
        description="Create a model and data that recipes, tests and benchmarks run on, without the Hub.",
    )
    tiny = parser.add_subparsers(dest="kind", required=True, metavar="{tiny}").add_parser(
        "tiny",
        help="a tiny model with random weights and synthetic data",
        description=TINY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny.add_argument("--output_dir", type=Path, required=True, help="directory to create, for instance .cache/tiny")
    tiny.add_argument("--model_type", default="qwen3", help="family of the model, for instance llama (default: qwen3)")
    tiny.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Make a tiny model, a teacher for it, arithmetic, preferences and questions, and return the exit status `0`."""
    from ..vision.families import FAMILIES

    if args.model_type in FAMILIES:
        return _run_vision(args)
    from ..examples.jsonl import count_rows
    from ..examples.tiny import make_arithmetic, make_model, make_preferences, make_questions

    makers = {
        "data": make_arithmetic,
        "preferences": make_preferences,
        "unpaired": partial(make_preferences, paired=False),
        "questions": make_questions,
    }
    _take_directory(args.output_dir, {"model", "teacher", *makers})
    model_dir = make_model(args.output_dir / "model", args.model_type)
    teacher_dir = make_model(args.output_dir / "teacher", args.model_type, seed=1)
    print(f"Model in {model_dir}, another as its teacher in {teacher_dir}")
    for name, make in makers.items():
        directory = make(args.output_dir / name)
        rows = count_rows(directory)
        print(f"{name.capitalize()} in {directory}: {rows['train']} training rows, {rows['test']} evaluation rows")
    return 0


def _run_vision(args: argparse.Namespace) -> int:
    try:
        from ..examples.tiny_vision import make_vision_model, write_digits
    except ImportError as error:
        # With [tpu], for pip to choose a torchvision for the torch of torch_xla, and not the newest with a torch of its own.
        extras = "images" if find_spec("torch_xla") is None else "tpu,images"
        raise UserError(
            f"--model_type {args.model_type} takes images, and needs {error.name}: {install_command(extras)}"
        ) from error
    _take_directory(args.output_dir, {"model", "data"})
    print(f"Model in {make_vision_model(args.output_dir / 'model', args.model_type)}")
    print(f"Digits in {write_digits(args.output_dir / 'data')}: 512 training rows, 64 evaluation rows")
    return 0


def _take_directory(output_dir: Path, names: set[str]) -> None:
    """Mark a directory as made here. One with files and without the mark is refused: `model` and `data` there are somebody's own."""
    files = {path.name for path in output_dir.iterdir()} if output_dir.is_dir() else set()
    others = sorted(files - names - {_MARK} if _MARK in files else files)
    if others:
        raise UserError(
            f"--output_dir {output_dir} holds other files ({', '.join(others[:3])}{', ...' * (len(others) > 3)}), and model, data "
            f"and others in it would be replaced. Give a directory of its own: --output_dir {output_dir / 'tiny'}"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / _MARK).touch()
